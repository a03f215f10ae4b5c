"""What the tests of the CUDA kernels need: a GPU, or clang to run the kernels on the CPU."""

import os
from pathlib import Path

import mlx.core as mx
import pytest
from demanded import lacking
from flashattn_core import _ext

# MLX's float32 products are TF32 on a GPU. What is compared with them is of float32's accuracy. MLX reads this once.
os.environ["MLX_ENABLE_TF32"] = "0"


@pytest.fixture
def requires_gpu():
    """Without MLX's CUDA build and a GPU the test is skipped, and says so."""
    if not mx.cuda.is_available():
        pytest.skip("no NVIDIA GPU, or MLX's build for the CPU: make cuda-check brings the other")


@pytest.fixture
def requires_plants():
    """A wheel takes no plants, unless it was built for tests."""
    if b"FLASHATTN_PLANT" not in (Path(_ext.__file__).parents[1] / "libflashattn_kernels.so").read_bytes():
        lacking("flashattn-core takes no plants: install it with -C cmake.define.FLASHATTN_PLANTS=ON")


@pytest.fixture
def requires_clang():
    from metal_on_cpu import MISSING

    if MISSING:
        lacking(MISSING)
