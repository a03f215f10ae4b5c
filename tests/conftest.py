"""Fixtures and plugins that all tests share."""

import signal
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

pytest_plugins = ["tests.lanes", "tests.packaging.finished_wheels", "tests.emulators.metal_on_cpu.report"]


@pytest.fixture(scope="session", autouse=True)
def _heeds_control_c() -> Iterator[None]:
    """Lets tests receive SIGINT. Processes started in the background ignore SIGINT, and their children inherit this."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A random generator, seeded with the test's name. A test gets the same numbers in every run."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Turns mx.compile off, because compiling takes a second or more for each of a model's small functions."""
    mx.disable_compile()
    yield
    mx.enable_compile()
