"""Result files describe the machine: versions, backend, memory, and the bounds of speed."""

import flashattn_core
from flash_evals.work import machine


def test_the_machine():
    """The description names what figures depend on. bandwidth() is in bytes per second, products() in FLOP/s."""
    described = machine.describe()
    assert described.versions.keys() == {"mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals"}
    kind, backend = described.device.split(", ", maxsplit=1)
    assert backend == flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]
    assert 1e8 < machine.free_memory() <= machine.physical_memory() < 1e14  # bytes
    assert all(1e7 < speed < 1e14 for speed in (machine.bandwidth(), machine.products("float32")))
