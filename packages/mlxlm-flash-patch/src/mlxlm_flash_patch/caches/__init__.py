"""mlx-lm's caches with quantised keys and values: plain, rotating, chunked and latent ones, and batches of them.

The first use of a class imports mlx-lm, and adds the classes to `mlx_lm.models.cache`, where mlx-lm looks up the
classes that a prompt cache file names. It raises RuntimeError if this release of mlx-lm was not tested.
"""

from typing import Any

__all__ = [
    "BatchQuantizedKVCache",
    "BatchQuantizedLatentKVCache",
    "BatchQuantizedRotatingKVCache",
    "QuantizedChunkedKVCache",
    "QuantizedKVCache",
    "QuantizedLatentKVCache",
    "QuantizedRotatingKVCache",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .release import require_tested

    require_tested()
    from . import quantized

    return getattr(quantized, name)
