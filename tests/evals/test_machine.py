"""What a result says of the machine it was measured on."""

import flashattn_core
from flash_evals import machine


def test_describe_names_what_a_figure_depends_on() -> None:
    described = machine.describe()
    assert described["versions"].keys() == {"mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals"}
    assert described["cores"] >= 1
    kind, backend = described["device"].split(", ", maxsplit=1)
    assert backend == flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]
