"""Describes the machine and its software, and measures the machine's peak speeds."""

import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import flashattn_core
import mlx.core as mx
from mlxlm_flash_patch.blas import blas

from flash_evals.results.errors import failing
from flash_evals.results.provenance import Machine

PRODUCT_SIZE = {"cpu": 384, "gpu": 8192}  # rows and columns of a matrix; 8192 keep any GPU busy
COPY_BYTES = 2**30  # much larger than a GPU's caches
PACKAGES = ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals")


def device() -> str:
    """Describes MLX's default device: `cpu, AVX-512, 2 threads`. Ends with `TF32` if MLX multiplies float32 in TF32."""
    gpu = "cuda" if mx.cuda.is_available() else "metal"
    with failing("flash attention does not run"):  # an environment variable FLASHATTN_* may be invalid
        backend = flashattn_core.backends()[gpu if kind() == "gpu" else "cpu"]
    return f"{kind()}, {backend}" + (", TF32" if tf32() else "")


def kind() -> str:
    """MLX's default device: `cpu` or `gpu`."""
    return "gpu" if mx.default_device() == mx.gpu else "cpu"


def tf32() -> bool:
    """Whether MLX rounds float32 factors to TF32's 11 bits. With CUDA it does, unless MLX_ENABLE_TF32 is 0."""
    return kind() == "gpu" and mx.cuda.is_available() and os.environ.get("MLX_ENABLE_TF32") != "0"


def free_memory() -> int:
    """How many bytes a program can allocate. With CUDA, free GPU memory and MLX's cache; else all until it swaps."""
    if (free := mx.device_info().get("free_memory")) is not None:
        return int(free) + mx.get_cache_memory()
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        [available] = re.findall(r"MemAvailable: +(\d+) kB", meminfo.read_text())
        return int(available) * 1024
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    usable = mx.device_info().get("max_recommended_working_set_size", physical)
    return int(usable) - mx.get_active_memory()


def peak_flops(dtype: str) -> float:
    """The peak FLOP/s of flash's threads on a CPU, for any `dtype`, or of MLX's matrix product in `dtype` on a GPU."""
    return flashattn_core.peak_flops() if kind() == "cpu" else products(dtype)


def products(dtype: str) -> float:
    """The FLOP/s of MLX's product of square matrices. Dividing by size**0.5 keeps repeated products from growing."""
    size = PRODUCT_SIZE[kind()]
    matrix = (mx.random.normal((size, size), key=mx.random.key(0)) / size**0.5).astype(getattr(mx, dtype))
    return _rate(lambda product: product @ matrix, matrix, 2 * size**3)


def bandwidth() -> float:
    """The memory bandwidth in bytes/s. On a CPU, flash's threads read. On a GPU, MLX's reads and writes both count."""
    if kind() == "cpu":
        return flashattn_core.read_bandwidth()
    array = mx.zeros((COPY_BYTES // 4,))
    return _rate(mx.negative, array, 2 * array.nbytes)


def _rate(step: Callable[[mx.array], mx.array], array: mx.array, amount: int) -> float:
    """Repeats a step that takes `amount` FLOP or bytes. Returns the FLOP or bytes per second."""

    def seconds(count: int) -> float:  # evaluates all steps at once, so that the host's time hardly counts
        result, start = array, time.perf_counter()
        for _ in range(count):
            result = step(result)
        mx.eval(result)
        return time.perf_counter() - start

    mx.eval(array)
    seconds(1)  # the first call is slower
    count = max(1, round(0.01 / seconds(1)))  # this many steps take about 0.01 s
    return amount * count / seconds(count)


def describe(also: Sequence[str] = ()) -> Machine:
    """Returns the machine as result files record it. `also` names further packages whose versions are recorded."""
    return Machine(
        system=platform.platform(),
        processor=str(mx.device_info().get("device_name", platform.processor())),
        cores=os.cpu_count(),
        device=device(),
        blas=blas(),
        python=platform.python_version(),
        versions={package: version(package) for package in (*PACKAGES, *also)},
    )
