"""A program that runs csrc/cuda with a fake CUDA driver and a fake NVRTC. Tests choose what these two answer."""

from pathlib import Path

from tests.builds import built, contents
from tests.core.programs import run

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "packages/flashattn-core/csrc"
COMPILER = ("c++", "-std=c++20", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined")
SOURCES = [CSRC / name for name in ("cuda/driver.cpp", "gpu/disk_cache.cpp")]
SOFTWARE = {"new": (), "old driver": ("-DOLD_DRIVER",)}


def _make(folder: Path) -> None:
    for name, options in SOFTWARE.items():
        (folder / name).mkdir()
        run(*COMPILER, *options, HERE / "libraries.cpp", "-shared", "-fPIC", "-o", folder / name / "libgpu.so")
    libraries = ("-L", folder / "new", "-lgpu", "-Wl,-z,dynamic-undefined-weak")
    run(*COMPILER, "-I", CSRC, HERE / "program.cpp", *SOURCES, *libraries, "-o", folder / "program")


def said(kernel: str = "kernel", shared: int = 0, software: str = "new", **answers: str) -> str:
    """Returns what program.cpp prints when it loads `kernel` with `shared` bytes of dynamic shared memory.

    libraries.cpp reads `answers` as environment variables.
    """
    folder = built(_make, "fake GPU", contents(HERE, CSRC, patterns=("*.cpp", "c*/*.h", "gpu/*.*", "cuda/*.cpp")))
    libraries = {"LD_LIBRARY_PATH": str(folder / software)}
    environment = {"FLASHATTN_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "", **libraries, **answers}
    return run(folder / "program", kernel, shared, **environment)
