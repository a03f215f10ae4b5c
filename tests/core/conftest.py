"""Fixtures that the tests of the core share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from tests.builds import built, contents
from tests.core.programs import cmake, only, require, run, sets_here

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "packages/flashattn-core"
SOURCES = ("*.h", "call/**/*", "cpu/**/*")  # the CPU backend's sources and headers, in csrc


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "build" in getattr(item, "fixturenames", ()) or hasattr(getattr(item, "module", None), "launches"):
            item.add_marker(pytest.mark.slow("compiles programs"))


@pytest.fixture(scope="session")
def everything(pytestconfig: pytest.Config) -> bool:
    """Whether pytest got the option --all. It makes the tests cover more cases."""
    return pytestconfig.getoption("--all")


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu() -> Iterator[None]:
    """Runs tests of the core on the CPU, whatever MLX's default device is."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="session")
def build() -> Callable[..., Path]:
    """A function that builds a CMake project and returns the build folder.

    The function builds once for the same sources, options and compiler version.

    made_of: the contents of all files that the build reads, by default the CPU backend, driver/ and `sources`.
    """

    def build(
        sources: Path, *options: str, build_type: str = "Release", target: str = "all", made_of: bytes | None = None
    ) -> Path:
        def make(folder: Path) -> None:
            cmake(sources, folder, f"-DCMAKE_BUILD_TYPE={build_type}", *options, target=target)

        compiler = next((o.partition("=")[2] for o in options if o.startswith("-DCMAKE_CXX_COMPILER=")), "c++")
        if made_of is None:
            made_of = contents(PACKAGE / "csrc", patterns=SOURCES) + contents(HERE / "driver", sources)
        return built(make, made_of, build_type, target, *options, run(compiler, "--version"))

    return build


@pytest.fixture(scope="session")
def drivers(build: Callable[..., Path], everything: bool) -> Path:
    """The folder of the programs in driver/, built for this machine's instruction sets or, with --all, for all."""
    return build(HERE / "driver", *([] if everything else [only(sets_here())]))


@pytest.fixture(scope="session")
def neon_drivers(build: Callable[..., Path]) -> Path:
    """The folder of the programs in driver/, built for 64-bit ARM. qemu-aarch64 runs them.

    They are linked statically, so that they need no ARM libraries on this machine.
    """
    require("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    return build(
        HERE / "driver",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        target="under_an_emulator",
    )
