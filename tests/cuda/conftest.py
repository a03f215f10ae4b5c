"""Fixtures for tests of the CUDA kernels that need a GPU, or that need clang to run the kernels on the CPU."""

import os
from pathlib import Path

import mlx.core as mx
import pytest
from flashattn_core import _ext

from tests.demanded import lacking

# By default MLX computes float32 products in TF32 on a GPU, but the tests need float32. MLX reads this variable once.
os.environ["MLX_ENABLE_TF32"] = "0"


@pytest.fixture
def requires_gpu():
    if not mx.cuda.is_available():
        pytest.skip("no NVIDIA GPU, or MLX's build for the CPU: make cuda-check brings the other")


@pytest.fixture
def requires_plants():
    """Requires an editable build of flashattn-core, or a build with FLASHATTN_PLANTS=ON.

    Only these builds read the variable FLASHATTN_PLANT, which changes the kernels' text.
    """
    if b"FLASHATTN_PLANT" not in (Path(_ext.__file__).parents[1] / "libflashattn_kernels.so").read_bytes():
        lacking("flashattn-core takes no plants: install it with -C cmake.define.FLASHATTN_PLANTS=ON")


@pytest.fixture
def requires_clang():
    from tests.emulators.metal_on_cpu import MISSING

    if MISSING:
        lacking(MISSING)
