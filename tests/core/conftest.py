"""Shared by the tests of the core."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Short by default. `pytest tests/core/test_properties.py tests/core/test_surface_*.py --hypothesis-profile=long`
# takes hours, and other cases each time.
settings.register_profile("project", deadline=None, max_examples=200, derandomize="CI" in os.environ)
settings.register_profile("long", deadline=None, max_examples=10_000, suppress_health_check=list(HealthCheck))
settings.load_profile("project")


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Tests of the core are of the CPU backend, wherever they run; those of the patch and of flash-eval are not."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


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
def build_drivers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds the programs in driver/ from the CPU backend alone, or other sources, and returns their folder."""

    def build(*options: str, build_type: str = "Release", target: str = "all", sources: str | Path = "driver") -> Path:
        source, folder = Path(__file__).parent / sources, tmp_path_factory.mktemp(Path(sources).name)
        # cmake and ninja are installed beside this Python.
        environment = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
        for command in (
            ["-S", source, "-B", folder, "-G", "Ninja", f"-DCMAKE_BUILD_TYPE={build_type}", *options],
            ["--build", folder, "--target", target],
        ):
            done = subprocess.run(
                ["cmake", *map(str, command)], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        return folder

    return build


@pytest.fixture(scope="session")
def drivers(build_drivers: Callable[..., Path]) -> Path:
    """The programs, for this machine."""
    return build_drivers()


@pytest.fixture(scope="session")
def require() -> Callable[[str, str], None]:
    """Skips the test where a program is missing, and names the package that brings it."""

    def require(program: str, package: str) -> None:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing: apt-get install {package}")

    return require


@pytest.fixture(scope="session")
def neon_drivers(build_drivers: Callable[..., Path], require: Callable[[str, str], None]) -> Path:
    """The same programs for 64-bit ARM, for qemu-aarch64 to run. Static: they need no ARM libraries at run time."""
    require("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    return build_drivers(
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    )
