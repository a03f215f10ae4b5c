"""Which machine, which versions, and what bounds them: named in every result, so that a figure can be read later."""

import os
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flashattn_core
import mlx.core as mx

PACKAGES = ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals")


def device() -> str:
    """One phrase: `cpu, AVX-512, 2 threads`."""
    kind = "gpu" if mx.default_device() == mx.gpu else "cpu"
    backend = flashattn_core.backends()["metal" if kind == "gpu" else "cpu"]
    return f"{kind}, {backend}"


@cache
def blas() -> str | None:
    """The matrix library behind MLX's linear layers on a Linux CPU; None elsewhere.

    MLX's Linux wheel brings the reference BLAS, one thread and no vector code, unless a faster one is preloaded.
    """
    maps = Path("/proc/self/maps")
    if mx.default_device() == mx.gpu or not maps.exists():
        return None
    loaded = maps.read_text().lower()
    return next((name for name in ("openblas", "mkl", "blis") if f"lib{name}" in loaded), "reference")


def describe() -> dict[str, Any]:
    """For the result files."""
    return {
        "system": platform.platform(),
        "processor": mx.device_info().get("device_name", platform.processor()),
        "cores": os.cpu_count(),
        "device": device(),
        "blas": blas(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }
