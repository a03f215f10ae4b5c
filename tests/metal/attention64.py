"""Attention in float64, and the kernels' types: what MLX's kernels are compared with."""

from __future__ import annotations

import numpy as np
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
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The result, and the log-sum-exp."""
    group = query.shape[1] // key.shape[1]
    query, key, value = decode(query), *(np.repeat(decode(each), group, axis=1) for each in (key, value))
    length, key_len = query.shape[2], key.shape[2]
    scores = scale * query @ key.swapaxes(-1, -2)
    if causal:
        scores = np.where(np.tri(length, key_len, key_len - length, dtype=bool), scores, -np.inf)
    row_max = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - row_max)
    row_sum = weights.sum(axis=-1, keepdims=True)
    return weights / row_sum @ value, (row_max + np.log(row_sum))[..., 0]


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, of the largest value. NaN where either has one."""
    return float(np.max(np.abs(decode(result) - expected)) / np.max(np.abs(expected)))
