"""A GPU's driver and NVRTC that answer as a test wants, and a program that uses them as csrc/cuda does."""

from collections.abc import Iterable
from pathlib import Path

from builds import built, contents
from programs import run

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "packages/flashattn-core/csrc"
COMPILER = ("c++", "-std=c++20", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined")
SOURCES = [CSRC / f"cuda/{name}.cpp" for name in ("driver", "programs", "cubin_cache")]
LIBRARIES = {"driver": ("libcuda.so.1", "-DCUDA"), "NVRTC": ("libnvrtc.so.13",)}
LIBRARIES |= {f"old {name}": (*how, "-DOLD") for name, how in LIBRARIES.items()}


def _make(folder: Path) -> None:
    run(*COMPILER, "-I", CSRC, HERE / "program.cpp", *SOURCES, "-o", folder / "program")
    for name, (file, *options) in LIBRARIES.items():
        shared = ("-shared", "-fPIC", f"-Wl,-soname,{file}", "-o", folder / name)
        run(*COMPILER, *options, HERE / "libraries.cpp", *shared)


def said(
    kernel: str = "kernel", shared: int = 0, libraries: Iterable[str] = ("driver", "NVRTC"), **answers: str
) -> str:
    """What is printed where a call's graph is built and evaluated with these libraries, which answer so."""
    folder = built(_make, "fake GPU", contents(HERE, CSRC, patterns=("*.cpp", "c*/*.h", "gpu/*.h", "cuda/*.cpp")))
    environment = {"FLASHATTN_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "", **answers}
    return run(folder / "program", kernel, shared, *(folder / name for name in libraries), **environment)
