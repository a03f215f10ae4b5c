"""What a result says of the machine it was measured on, and what the machine lets nobody exceed."""

import flashattn_core
from flash_evals import machine


def test_describe_names_what_a_figure_depends_on():
    described = machine.describe()
    assert described["versions"].keys() == {"mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals"}
    assert described["cores"] >= 1
    kind, backend = described["device"].split(", ", maxsplit=1)
    assert backend == flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]


def test_memory_is_in_bytes():
    assert 1e8 < machine.free_memory() <= machine.physical_memory() < 1e14


def test_bounds_are_per_second():
    measured = machine.bounds(times=2)
    for figures in (measured.multiply_adds, measured.reads, measured.matrix_products):
        assert len(figures) == 2
        assert all(1e7 < figure < 1e14 for figure in figures)
