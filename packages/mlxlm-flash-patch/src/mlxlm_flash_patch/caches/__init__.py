"""mlx-lm's caches with quantised keys and values: plain, rotating and chunked, and batches of the first two.

Importing this package imports mlx-lm, and adds the classes to `mlx_lm.models.cache`, where mlx-lm looks up the classes
that a prompt cache file names.
"""

from .quantized import (
    BatchQuantizedKVCache,
    BatchQuantizedLatentKVCache,
    BatchQuantizedRotatingKVCache,
    QuantizedChunkedKVCache,
    QuantizedKVCache,
    QuantizedLatentKVCache,
    QuantizedRotatingKVCache,
)

__all__ = [
    "BatchQuantizedKVCache",
    "BatchQuantizedLatentKVCache",
    "BatchQuantizedRotatingKVCache",
    "QuantizedChunkedKVCache",
    "QuantizedKVCache",
    "QuantizedLatentKVCache",
    "QuantizedRotatingKVCache",
]
