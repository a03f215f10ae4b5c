"""Which machine, which versions, and what bounds them: a figure without these means nothing later."""

import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flashattn_core
import mlx.core as mx
from mlxlm_flash_patch.blas import blas

from flash_evals.errors import EvalError, first_line

REFERENCE_BLAS = (
    "The linear layers run on MLX's reference BLAS here (Linux CPU): they bound all tokens/s above, whatever\n"
    "attention does. A faster BLAS, preloaded, moves both arms."
)

PACKAGES = ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals")


def device() -> str:
    """One phrase: `cpu, AVX-512, 2 threads`."""
    try:
        backend = flashattn_core.backends()["metal" if kind() == "gpu" else "cpu"]
    except ValueError as error:
        raise EvalError(first_line(error)) from error  # a FLASHATTN_ variable holds nonsense
    return f"{kind()}, {backend}"


def kind() -> str:
    """MLX's default device: `cpu` or `gpu`."""
    return "gpu" if mx.default_device() == mx.gpu else "cpu"


def free_memory() -> int:
    """Bytes that a program can take without the machine swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        [available] = re.findall(r"MemAvailable: +(\d+) kB", meminfo.read_text())
        return int(available) * 1024
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    usable = mx.device_info().get("max_recommended_working_set_size", physical)
    return int(usable) - mx.get_active_memory()


def describe(also: Sequence[str] = ()) -> dict[str, Any]:
    """For the result files, with the versions of the packages that took part `also`."""
    return {
        "system": platform.platform(),
        "processor": mx.device_info().get("device_name", platform.processor()),
        "cores": os.cpu_count(),
        "device": device(),
        "blas": blas(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in (*PACKAGES, *also)},
    }
