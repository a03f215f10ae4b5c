"""The BLAS behind MLX's linear layers on a Linux CPU: which it is, and another in its place.

MLX's Linux wheel brings the reference BLAS, one thread and no vector code. MLX calls what the loader finds first, so a
library in LD_PRELOAD goes before it. The loader reads LD_PRELOAD when a program starts: hence the second start.
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
STARTED_AGAIN = "MLXLM_FLASH_BLAS"  # holds a process id: a second start has the same, a child another
MAPS = Path("/proc/self/maps")


def blas() -> str | None:
    """`openblas`, `mkl`, `blis`, `reference`, or another's name; None where MLX uses none (macOS, a GPU)."""
    library = None if mx.default_device() == mx.gpu else _called()
    return library and name_of(library)


def name_of(library: str) -> str:
    """Debian's libblas.so.3 of OpenBLAS is known by its folder."""
    *_, folder, file = Path(library).parts
    own = file.partition(".")[0].removeprefix("lib")
    other = "reference" if own.startswith(("blas", "cblas")) else own
    return next((name for name in ("openblas", "mkl", "blis") if name in f"{folder}/{file}".lower()), other)


def preload(choice: str) -> None:
    """Sees to it that MLX calls the library at the path `choice`; `auto`: another than the reference, or openblas().

    Starts this program again, once, with the library in LD_PRELOAD. Returns if MLX calls it. Raises ValueError, one
    line, if there is none, MLX cannot call it, or does not.
    """
    is_second = os.environ.pop(STARTED_AGAIN, None) == str(os.getpid())
    called = _called()
    if sys.platform != "linux" or called is None:
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
        if os.path.samefile(library, called):
            if is_fast:
                return
            raise ValueError(f"--blas {library} is the slow reference BLAS itself")
    if is_second:
        raise ValueError(f"--blas {library} is preloaded, but MLX still calls {called} ({name_of(called)})")
    preloaded = ":".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))
    environment = {**os.environ, "LD_PRELOAD": preloaded, STARTED_AGAIN: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def openblas() -> str | None:
    """One with threads that MLX can call, as LD_PRELOAD takes it."""
    for library in _known():
        with contextlib.suppress(ValueError, AttributeError):  # another ABI, or no OpenBLAS
            if _load(library).openblas_get_parallel():
                return library
    return None


def _known() -> Iterator[str]:
    """Conda's, beside which the system's Fortran library might not do; Debian's; the loader's, Fedora's with threads
    before the one without. Those of NumPy and SciPy prefix all names, so that nobody else can call them."""
    yield from map(str, Path(sys.base_prefix, "lib").glob("libopenblas.so.0"))
    yield from map(str, Path("/usr/lib").glob("*/openblas-pthread/libopenblas.so.0"))
    yield from filter(None, map(find_library, ("openblasp", "openblas")))


def _file(choice: str) -> str:
    """The path of a library that MLX can call and LD_PRELOAD can name. Raises ValueError."""
    library = os.path.abspath(choice)
    if not os.path.isfile(library):
        raise ValueError(f"--blas takes auto or the file of a library, not {choice!r}")
    if {" ", ":"} & set(library):
        raise ValueError(f"--blas {library}: LD_PRELOAD takes no path with a space or a colon")
    _load(library)
    return library


def _load(library: str) -> ctypes.CDLL:
    """Raises ValueError unless MLX can call it: it loads, has the plain names, and takes integers of 32 bits."""
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
    """The file whose cblas_sgemm MLX calls: the program's own, if it has one, before that which MLX brings."""
    brought = ctypes.CDLL(mx.__file__)
    if not MAPS.exists() or not hasattr(brought, "cblas_sgemm"):
        return None
    first = ctypes.CDLL(None)
    function = (first if hasattr(first, "cblas_sgemm") else brought).cblas_sgemm
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    for line in MAPS.read_text().splitlines():
        span, *_, file = line.split(maxsplit=5)
        begin, end = (int(edge, 16) for edge in span.split("-"))
        if begin <= address < end:
            return file
    return None
