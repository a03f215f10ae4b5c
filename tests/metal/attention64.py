"""Attention in float64, and the kernels' types: what MLX's kernels are compared with."""

from __future__ import annotations

import numpy as np
from flashattn_core.reference import reference_attention
from metal_on_cpu import from_bfloat16, to_bfloat16

DTYPES = ("float", "half", "bfloat")
# Of the largest value of the result. MLX's kernels compute in float and round their result once.
TOLERANCE = {"float": 3e-6, "half": 2e-3, "bfloat": 1.5e-2}


def encode(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat":
        return to_bfloat16(array)
    return array.astype({"float": np.float32, "half": np.float16}[dtype])


def decode(array: np.ndarray) -> np.ndarray:
    return (from_bfloat16(array) if array.dtype == np.uint16 else array).astype(np.float64)


def draw(
    rng: np.random.Generator,
    dtype: str,
    *,
    heads: int,
    kv_heads: int,
    length: int,
    key_len: int,
    dim: int,
    batch: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random query, key and value."""
    shapes = ((batch, heads, length, dim), (batch, kv_heads, key_len, dim), (batch, kv_heads, key_len, dim))
    query, key, value = (encode(rng.standard_normal(shape), dtype) for shape in shapes)
    return query, key, value


def attention64(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float, *, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The result, and the log-sum-exp."""
    return reference_attention(decode(query), decode(key), decode(value), scale, "causal" if causal else None)


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, of the largest value. NaN where either has one."""
    return float(np.max(np.abs(decode(result) - expected)) / np.max(np.abs(expected)))
