"""Shared by the tests of the core."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings

# Tests are of the CPU backend wherever they run.
mx.set_default_device(mx.cpu)

settings.register_profile("project", deadline=None, max_examples=200, derandomize="CI" in os.environ)
settings.load_profile("project")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, the same in every run."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a piece of Python in a fresh process, with extra environment variables."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs in driver/, built from the CPU backend alone."""
    build = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "driver"
    # cmake and ninja are installed beside this Python.
    environment = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
    for command in (["-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"], ["--build", build]):
        done = subprocess.run(
            ["cmake", *map(str, command)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return build
