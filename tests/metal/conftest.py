"""Shared by the tests of the Metal kernels."""

from pathlib import Path

import numpy as np
import pytest
from metal_on_cpu import MISSING


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, the same in every run."""
    return np.random.default_rng(list(request.node.name.encode()))
