"""Which machine, which versions, and what bounds them: a figure without these means nothing later."""

import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
        gpu = "cuda" if mx.cuda.is_available() else "metal"
        backend = flashattn_core.backends()[gpu if kind() == "gpu" else "cpu"]
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
    usable = mx.device_info().get("max_recommended_working_set_size", physical_memory())
    return int(usable) - mx.get_active_memory()


def physical_memory() -> int:
    """Bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Bounds:
    """What a CPU lets nobody exceed, measured several times within a second or two."""

    multiply_adds: list[float]  # FLOP/s of flash's threads in registers
    reads: list[float]  # bytes/s of flash's threads from memory
    matrix_products: list[float]  # FLOP/s of MLX in float32, which is what linear layers run at


def bounds(times: int = 5) -> Bounds:
    _matrix_product()  # the first one is slower
    taken = [(flashattn_core.peak_flops(), flashattn_core.read_bandwidth(), _matrix_product()) for _ in range(times)]
    multiply_adds, reads, matrix_products = (list(column) for column in zip(*taken, strict=True))
    return Bounds(multiply_adds, reads, matrix_products)


def _matrix_product(size: int = 384) -> float:
    matrix = mx.ones((size, size))
    mx.eval(matrix)
    start = time.perf_counter()
    mx.eval(matrix @ matrix)
    return float(2 * size**3 / (time.perf_counter() - start))


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
