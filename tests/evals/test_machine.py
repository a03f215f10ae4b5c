"""What a result says of the machine it was measured on."""

import flashattn_core
import pytest
from flash_evals import machine


def test_describe_names_what_a_figure_depends_on() -> None:
    described = machine.describe()
    assert described["versions"].keys() == {"mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals"}
    assert described["cores"] >= 1
    kind, backend = described["device"].split(", ", maxsplit=1)
    assert backend == flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("/venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", "reference"),
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so", "openblas"),
        ("/venv/numpy.libs/libscipy_openblas64_-8fb3d286.so", "reference"),
        ("/opt/intel/libmkl_rt.so.2", "mkl"),
    ],
)
def test_blas(library: str, name: str) -> None:
    always = "7f00-7f01 r-xp 00000000 fe:00 1 /venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0\n"
    assert machine.blas_in(always + always.replace("/venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", library)) == name
