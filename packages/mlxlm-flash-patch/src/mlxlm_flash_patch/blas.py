"""Finds the BLAS that MLX's linear layers use on a Linux CPU, and replaces it.

MLX's Linux wheel contains the reference BLAS, with one thread and no vector code. MLX calls the first BLAS that the
loader finds, and the loader looks in LD_PRELOAD first. It reads LD_PRELOAD only when a program starts, so preload()
starts the program a second time.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path

import mlx.core as mx

REFERENCE = "MLX multiplies matrices with the slow reference BLAS, which limits tokens/s: --blas auto preloads OpenBLAS"
INSTALL = "apt-get install libopenblas0-pthread"
STARTED_AGAIN = "MLXLM_FLASH_BLAS"  # the restarted process's id. A child that inherits the variable has another id


def blas() -> str | None:
    """The BLAS that MLX calls: `openblas`, `mkl`, `blis`, `reference` or another name. None on macOS and on a GPU."""
    library = None if mx.default_device() == mx.gpu else _called()
    return library and name_of(library)


def name_of(library: str) -> str:
    """The name of a BLAS, from the names of its file and folder. The folder is needed, because on Debian OpenBLAS's
    file may be openblas-pthread/libblas.so.3."""
    *_, folder, file = Path(library).parts
    own = file.partition(".")[0].removeprefix("lib")
    other = "reference" if own.startswith(("blas", "cblas")) else own
    return next((name for name in ("openblas", "mkl", "blis") if name in f"{folder}/{file}".lower()), other)


def preload(choice: str) -> None:
    """Makes MLX call the library at path `choice`. `auto` means openblas(), unless MLX already calls a fast BLAS.

    If MLX does not call that library yet, preload() restarts this program once, with the library in LD_PRELOAD. Raises
    a one-line ValueError if the library is missing or unfit for MLX, or if the restart does not help.
    """
    is_second = os.environ.pop(STARTED_AGAIN, None) == str(os.getpid())
    called = _called()
    if called is None:
        raise ValueError("--blas works only with MLX's CPU build on Linux")
    is_fast = name_of(called) != "reference"
    if choice == "auto":
        if is_fast:
            return
        library = openblas()
        if library is None:
            raise ValueError(f"--blas auto finds no OpenBLAS with threads on this machine: {INSTALL}")
    else:
        library = _file(choice)
        if os.path.exists(called) and os.path.samefile(library, called):
            if is_fast:
                return
            raise ValueError(f"--blas {library} is the slow reference BLAS itself")
    if is_second:
        raise ValueError(f"--blas {library} is preloaded, but MLX still calls {called} ({name_of(called)})")
    preloaded = ":".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))
    environment = {**os.environ, "LD_PRELOAD": preloaded, STARTED_AGAIN: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def openblas() -> str | None:
    """A multithreaded OpenBLAS that MLX can call: a path or name for LD_PRELOAD. None if there is none."""
    for library in _known():
        with contextlib.suppress(ValueError, AttributeError):  # MLX cannot call the library, or it is not OpenBLAS
            if _load(library).openblas_get_parallel():
                return library
    return None


def _known() -> Iterator[str]:
    """The files or names under which an OpenBLAS may be installed, in the order of preference.

    Conda's OpenBLAS comes first: another OpenBLAS may not work with conda's Fortran library. On Fedora, libopenblasp
    has threads, libopenblas has none. MLX cannot call NumPy's and SciPy's OpenBLAS, whose functions have other names.
    """
    yield from map(str, Path(sys.base_prefix, "lib").glob("libopenblas.so.0"))
    yield from map(str, Path("/usr/lib").glob("*/openblas-pthread/libopenblas.so.0"))
    yield from filter(None, map(find_library, ("openblasp", "openblas")))


def _file(choice: str) -> str:
    """The absolute path of `choice`. Raises ValueError if MLX cannot call this library, or LD_PRELOAD cannot hold the
    path."""
    library = os.path.abspath(choice)
    if not os.path.isfile(library):
        raise ValueError(f"--blas takes auto or the file of a library, not {choice!r}")
    if {" ", ":"} & set(library):
        raise ValueError(f"--blas {library}: LD_PRELOAD takes no path with a space or a colon")
    _load(library)
    return library


def _load(library: str) -> ctypes.CDLL:
    """Loads a BLAS for MLX. Raises ValueError if it does not load, has no cblas_sgemm or takes 64-bit integers."""
    try:
        loaded = ctypes.CDLL(library)
    except OSError as error:
        raise ValueError(f"--blas {library} does not load: {str(error).removeprefix(f'{library}: ')}") from error
    if not hasattr(loaded, "cblas_sgemm"):
        raise ValueError(f"--blas {library} has no cblas_sgemm, which MLX calls")
    if hasattr(loaded, "openblas_get_config"):
        loaded.openblas_get_config.restype = ctypes.c_char_p
        if b"USE64BITINT" in loaded.openblas_get_config():
            raise ValueError(f"--blas {library} takes integers of 64 bits, but MLX passes 32 bits")
    return loaded


def _called() -> str | None:
    """The file of the BLAS library that MLX calls. A preloaded library comes before MLX's own libraries."""
    brought, program = ctypes.CDLL(mx.__file__), ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(brought, "cblas_sgemm"):
        return None
    function = (program if hasattr(program, "cblas_sgemm") else brought).cblas_sgemm
    info = (ctypes.c_char_p * 4)()  # a Dl_info, which begins with the name of the library's file
    program.dladdr(function, info)
    return os.path.realpath(os.fsdecode(info[0])) if info[0] else None
