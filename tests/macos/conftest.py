"""Fixtures that build a wheel for macOS once for all tests, and run programs of packages/flashattn-core/macos."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "packages/flashattn-core/macos"
CANNOT = 2  # the exit status of the programs, and of uv, if something is missing on this machine

Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass
class Built:
    wheel: Path
    mlx: Path  # folder of the MLX that `wheel` was built with
    exit_code: int
    printed: str

    @property
    def names(self) -> list[str]:
        return zipfile.ZipFile(self.wheel).namelist()

    @property
    def module_name(self) -> str:
        return next(name for name in self.names if "/_ext." in name and name.endswith(".so"))

    @property
    def module(self) -> bytes:
        return zipfile.ZipFile(self.wheel).read(self.module_name)


@pytest.fixture(scope="session")
def run() -> Run:
    """Returns a function that runs one of the programs with `uv run`, and with the packages that the program names."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is missing: python3 -m pip install uv")

    def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [uv, "run", "--quiet", "--python", sys.executable, PROGRAMS / program, *arguments]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode == CANNOT:
            pytest.skip(done.stderr.strip())
        return done

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the mark `slow` to tests that use run(). Its programs fetch a 100 MB compiler and build twice."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow("builds the wheel for macOS, or asks what is missing for it"))


@pytest.fixture(scope="session")
def built(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("macos")
    done = run("build.py", "--output", folder, "--work", folder / "work")
    wheel = next(folder.glob("*.whl"), None)
    assert wheel is not None, done.stdout + done.stderr  # even if build.py has failed: see exit_code
    return Built(wheel, folder / "work/wheels/mlx", done.returncode, done.stdout)
