"""Describes and measures the machine and its software, without which a figure means nothing later."""

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

PRODUCT_SIZE = {"cpu": 384, "gpu": 8192}  # rows of a matrix; 8192 keep any GPU busy
COPY_BYTES = 2**30  # much larger than a GPU's caches
PACKAGES = ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch", "flash-evals")


def device() -> str:
    """In words: `cpu, AVX-512, 2 threads`; for a GPU also whether MLX multiplies float32 as TF32 there."""
    gpu = "cuda" if mx.cuda.is_available() else "metal"
    with failing("flash attention does not run"):  # a FLASHATTN_ variable may be invalid
        backend = flashattn_core.backends()[gpu if kind() == "gpu" else "cpu"]
    return f"{kind()}, {backend}" + (", TF32" if tf32() else "")


def kind() -> str:
    """MLX's default device: `cpu` or `gpu`."""
    return "gpu" if mx.default_device() == mx.gpu else "cpu"


def tf32() -> bool:
    """Whether MLX rounds float32 factors to TF32's 11 bits, as it does with CUDA unless MLX_ENABLE_TF32 is 0."""
    return kind() == "gpu" and mx.cuda.is_available() and os.environ.get("MLX_ENABLE_TF32") != "0"


def free_memory() -> int:
    """Bytes that a program can allocate: of the GPU's memory with CUDA, else before the machine swaps."""
    if (free := mx.device_info().get("free_memory")) is not None:
        return int(free) + mx.get_cache_memory()
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        [available] = re.findall(r"MemAvailable: +(\d+) kB", meminfo.read_text())
        return int(available) * 1024
    usable = mx.device_info().get("max_recommended_working_set_size", physical_memory())
    return int(usable) - mx.get_active_memory()


def physical_memory() -> int:
    """Bytes of the machine's memory; with CUDA, of the GPU's."""
    if (total := mx.device_info().get("total_memory")) is not None:
        return int(total)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_flops(dtype: str) -> float:
    """FLOP/s that flash's threads reach in registers; on a GPU, those of MLX's matrix product in that dtype."""
    return flashattn_core.peak_flops() if kind() == "cpu" else products(dtype)


def products(dtype: str) -> float:
    """FLOP/s of MLX's product of square matrices, scaled so that repeated products do not grow."""
    size = PRODUCT_SIZE[kind()]
    matrix = (mx.random.normal((size, size), key=mx.random.key(0)) / size**0.5).astype(getattr(mx, dtype))
    return _rate(lambda product: product @ matrix, matrix, 2 * size**3)


def bandwidth() -> float:
    """Bytes/s that flash's threads read from memory; on a GPU, those that MLX reads and writes in a copy."""
    if kind() == "cpu":
        return flashattn_core.read_bandwidth()
    array = mx.zeros((COPY_BYTES // 4,))
    return _rate(mx.negative, array, 2 * array.nbytes)


def _rate(step: Callable[[mx.array], mx.array], array: mx.array, amount: int) -> float:
    """FLOP or bytes per second, for a step that takes `amount` of them."""

    def seconds(count: int) -> float:  # many steps in one evaluation, to make the host's share small
        result, start = array, time.perf_counter()
        for _ in range(count):
            result = step(result)
        mx.eval(result)
        return time.perf_counter() - start

    mx.eval(array)
    seconds(1)  # the first call is slower
    count = max(1, round(0.01 / seconds(1)))  # steps that take 0.01 s
    return amount * count / seconds(count)


def describe(also: Sequence[str] = ()) -> Machine:
    """The machine as result files record it. also: further packages whose versions matter."""
    return Machine(
        system=platform.platform(),
        processor=str(mx.device_info().get("device_name", platform.processor())),
        cores=os.cpu_count(),
        device=device(),
        blas=blas(),
        python=platform.python_version(),
        versions={package: version(package) for package in (*PACKAGES, *also)},
    )
