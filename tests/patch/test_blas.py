"""Which BLAS a process runs on, told by the libraries that it has loaded."""

import pytest
from mlxlm_flash_patch.blas import blas_in


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("/venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", "reference"),
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so", "openblas"),
        ("/venv/numpy.libs/libscipy_openblas64_-8fb3d286.so", "reference"),
        ("/opt/intel/libmkl_rt.so.2", "mkl"),
    ],
)
def test_blas(library, name):
    always = "7f00-7f01 r-xp 00000000 fe:00 1 /venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0\n"
    assert blas_in(always + always.replace("/venv/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", library)) == name
