"""Fixtures and plugins that all tests share."""

import signal
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import _ext

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
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Lists (path, precision) of each flash attention call. Plain calls have the path "quick", and others "long"."""
    seen, own_quick, own_attention = [], _ext.quick, _ext.attention

    def quick(*arguments):
        seen.append(("quick", "input" if arguments[6] else "float32"))
        return own_quick(*arguments)

    def attention(arguments, *others):
        seen.append(("long", "input" if arguments.call.rounds else "float32"))
        return own_attention(arguments, *others)

    monkeypatch.setattr(_ext, "quick", quick)
    monkeypatch.setattr(_ext, "attention", attention)
    return seen


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Turns mx.compile off, because compiling takes a second or more for each of a model's small functions."""
    mx.disable_compile()
    yield
    mx.enable_compile()
