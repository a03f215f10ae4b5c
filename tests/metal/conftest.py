"""Shared by the tests of the Metal kernels."""

import mlx.core as mx
import pytest
from demanded import lacking
from metal_on_cpu import MISSING

# Where there is one, see metal_attention.py.
RUN_ON_A_GPU_TOO = {"test_rules.py", "test_kernels.py", "test_quantised_kernels.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_shim_"):  # of the harness itself, which seldom changes
            item.add_marker(pytest.mark.rotate(8))


@pytest.fixture(autouse=True, scope="module")
def _clang(request: pytest.FixtureRequest) -> None:
    if MISSING and not (mx.metal.is_available() and request.path.name in RUN_ON_A_GPU_TOO):
        lacking(MISSING)
