"""Exact, memory-linear attention for MLX: FlashAttention-2 and FlashDecoding as one MLX primitive."""

import sys
from pathlib import Path

from . import _releases

try:
    import mlx.core as mx  # before _ext, which links to the libmlx that mlx.core loads
except ImportError as error:
    # On Linux, mlx without an extra does not install libmlx.
    _cure = _releases.install_command(__path__)
    if sys.platform == "linux":
        _cure = "pip install 'flashattn-core[cpu]', or [cuda12] or [cuda13] for an NVIDIA GPU"
    if sys.platform == "linux" and "cuda" in str(error):  # there is no driver, an old one, or no GPU
        _cure = "MLX's build for CUDA needs a GPU and NVIDIA's driver; for the CPU, pip install 'flashattn-core[cpu]'"
    raise ImportError(f"flashattn_core needs mlx, which does not load: {error}. {_cure}") from error
else:
    __path__.append(str(_releases.module_folder(mx.__version__, __path__)))  # type: ignore[attr-defined]

from . import _ext as _ext  # the package's other modules import it from here
from . import masks
from ._ext import NoKernelError, array_id, peak_flops, read_bandwidth, release_scratch, reset_stats, stats
from .attention import flash_attention, quantized_flash_attention
from .plan import Plan, max_head_dim, plan

__version__ = "0.1.0"

__all__ = [
    "NoKernelError",
    "Plan",
    "array_id",
    "backends",
    "flash_attention",
    "is_tracing",
    "masks",
    "max_head_dim",
    "peak_flops",
    "plan",
    "quantized_flash_attention",
    "read_bandwidth",
    "release_scratch",
    "reset_stats",
    "stats",
]

_DEVICES = Path("/dev")


def backends() -> dict[str, str]:
    """Describes each backend on this machine: ``{"cpu": "AVX2, 2 threads", "metal": "not in this MLX build", ...}``.

    If a backend could work here and does not, its text ends with a colon and what to install.

    Raises ValueError if FLASHATTN_CPU_ISA or FLASHATTN_NUM_THREADS has an invalid value.
    """
    metal = cuda = "not in this MLX build"
    if mx.metal.is_available():
        metal = str(mx.device_info(mx.gpu)["device_name"])
    if mx.cuda.is_available():
        try:
            cuda = _ext.describe_cuda()
        except NoKernelError as error:
            cuda = str(error).removeprefix("[flash_attention] ")
    elif any(_DEVICES.glob("nvidia[0-9]*")):
        cuda += ", though there is an NVIDIA GPU: pip install 'flashattn-core[cuda13]', or [cuda12]"
    return {"cpu": _ext.describe_cpu(), "metal": metal, "cuda": cuda}


def is_tracing(*arrays: mx.array) -> bool:
    """Whether mx.grad, mx.vjp, mx.vmap or mx.compile is tracing any of the arrays."""
    return any(map(_ext.is_tracing, arrays))
