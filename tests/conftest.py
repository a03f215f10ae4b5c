"""Shared by all tests."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest

pytest_plugins = ["lanes", "finished_wheels", "metal_on_cpu.report"]


@pytest.fixture(scope="session", autouse=True)
def _heeds_control_c() -> Iterator[None]:
    """Processes started in the background ignore SIGINT, and their children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, the same in every run."""
    return np.random.default_rng(list(request.node.name.encode()))
