"""Attention in plain float64 numpy, O(L*S) in memory: the reference that the tests compare with.

Needs numpy (``pip install 'flashattn-core[reference]'``).
"""

from typing import Any

import mlx.core as mx
import numpy as np

from .masks import lower


def reference_attention(
    query: Any,
    key: Any,
    value: Any,
    scale: float | None = None,
    mask: Any = None,
    *,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out, lse) of :func:`flash_attention` as float64 numpy arrays. Takes the same masks."""
    query, key, value = (np.asarray(a, dtype=np.float64) for a in (query, key, value))
    group = query.shape[-3] // key.shape[-3]
    key, value = np.repeat(key, group, axis=-3), np.repeat(value, group, axis=-3)
    length, key_len = query.shape[-2], key.shape[-2]

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN and infinity are valid inputs
        scores = query @ key.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores - per_head(alibi_slopes) * np.abs(distance(length, key_len))
        visible, bias = visible_and_bias(query.shape, key_len, mask)
        scores = np.where(visible, scores + bias, -np.inf)

        sink = -np.inf if sinks is None else per_head(sinks)
        row_max = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        row_max = np.where(row_max == -np.inf, 0, row_max)
        weights = np.where(visible, np.exp(scores - row_max), 0)
        row_sum = weights.sum(axis=-1, keepdims=True) + np.exp(sink - row_max)
        sees_any = (scores != -np.inf).any(axis=-1, keepdims=True)
        weights = np.where(sees_any, weights / row_sum, 0)
        lse = np.where(sees_any, row_max + np.log(row_sum), -np.inf)[..., 0]

        if np.isfinite(value).all():
            return weights @ value, lse
        # 0 * NaN is NaN, so the sum must leave out hidden keys.
        products = weights[..., None] * value[..., None, :, :]
        return np.where(visible[..., None], products, 0).sum(axis=-2), lse


def visible_and_bias(query_shape: tuple[int, ...], key_len: int, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Expands a mask to two arrays ``(*B, H_q, L, S)``: `visible`, True where a query sees a key, and `bias`, which is
    added to the scores."""
    *batch, heads, length, _ = query_shape
    m = lower(mask)
    visible = np.ones((*batch, heads, length, key_len), dtype=bool)
    bias = np.zeros(visible.shape)
    columns = np.arange(key_len)
    if "causal" in m:
        behind = distance(length, key_len)
        visible &= (behind >= 0) & (behind < m.get("window", np.inf))
    if "key_start" in m:
        visible &= columns >= np.asarray(m["key_start"])[..., None, None, None]
    if "key_stop" in m:
        visible &= columns < np.asarray(m["key_stop"])[..., None, None, None]
    if "tree" in m:
        words = np.ascontiguousarray(m["tree"])
        size = words.shape[-2]
        sees = np.unpackbits(words.view(np.uint8), axis=-1, count=size, bitorder="little").astype(bool)
        visible[..., : max(0, length - size), key_len - size :] = False
        visible[..., max(0, length - size) :, key_len - size :] &= sees[..., None, max(0, size - length) :, :]
    if "visible" in m:
        visible &= np.asarray(m["visible"])
    if "bias" in m:
        added = np.asarray(m["bias"].astype(mx.float32), dtype=np.float64)
        visible &= added != -np.inf
        bias = bias + np.where(added == -np.inf, 0, added)
    return visible, bias


def distance(length: int, key_len: int) -> np.ndarray:
    """``i + S - L - j`` for each query i and key j: how far behind the query the key is."""
    return np.arange(length)[:, None] + key_len - length - np.arange(key_len)[None, :]


def per_head(numbers: Any) -> np.ndarray:
    return np.asarray(numbers, dtype=np.float64)[:, None, None]
