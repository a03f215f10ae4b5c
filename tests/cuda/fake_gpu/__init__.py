"""A GPU's driver and NVRTC that answer as a test wants, and a program that uses them as csrc/cuda does."""

from pathlib import Path

from builds import built, contents
from programs import run

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "packages/flashattn-core/csrc"
COMPILER = ("c++", "-std=c++20", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined")
SOURCES = [CSRC / name for name in ("cuda/driver.cpp", "gpu/disk_cache.cpp")]
SOFTWARE = {"new": (), "old driver": ("-DOLD_DRIVER",), "old NVRTC": ("-DOLD_NVRTC",)}


def _make(folder: Path) -> None:
    run(*COMPILER, "-I", CSRC, HERE / "program.cpp", *SOURCES, "-o", folder / "program")
    for name, options in SOFTWARE.items():
        shared = ("-shared", "-fPIC", "-Wl,-soname,libmlx.so", "-o", folder / name)
        run(*COMPILER, *options, HERE / "libraries.cpp", *shared)


def said(kernel: str = "kernel", shared: int = 0, software: str = "new", **answers: str) -> str:
    """What is printed where a call's graph is built and evaluated with this driver and NVRTC, which answer so."""
    folder = built(_make, "fake GPU", contents(HERE, CSRC, patterns=("*.cpp", "c*/*.h", "gpu/*.*", "cuda/*.cpp")))
    environment = {"FLASHATTN_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "", **answers}
    return run(folder / "program", kernel, shared, folder / software, **environment)
