"""Fixtures that the tests of the Metal kernels share."""

import mlx.core as mx
import pytest

from tests.demanded import lacking
from tests.emulators.metal_on_cpu import MISSING

# On a Mac, the tests in these files run on the GPU and need no clang (see metal_attention.py).
RUN_ON_A_GPU_TOO = {"test_metal_rules.py", "test_metal_kernels.py", "test_quantised_kernels.py"}


@pytest.fixture(autouse=True, scope="module")
def _clang(request: pytest.FixtureRequest) -> None:
    if MISSING and not (mx.metal.is_available() and request.path.name in RUN_ON_A_GPU_TOO):
        lacking(MISSING)
