"""The matrix library behind MLX's linear layers on a Linux CPU, which bounds tokens per second there."""

from functools import cache
from pathlib import Path

import mlx.core as mx


@cache
def blas() -> str | None:
    """`openblas`, `mkl`, `blis`, or `reference`; None where MLX uses another (macOS, a GPU).

    MLX's Linux wheel brings the reference BLAS, one thread and no vector code; a faster one can be preloaded.
    """
    maps = Path("/proc/self/maps")
    return blas_in(maps.read_text()) if mx.default_device() != mx.gpu and maps.exists() else None


def blas_in(maps: str) -> str:
    """Of the libraries that a process has loaded. NumPy's own (libscipy_openblas) serves nobody else."""
    return next((name for name in ("openblas", "mkl", "blis") if f"/lib{name}" in maps.lower()), "reference")
