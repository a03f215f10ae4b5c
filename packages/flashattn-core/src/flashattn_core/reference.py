"""The whole algorithm in plain steps, O(L*S) in memory and in float64: the oracle of every test.

Takes numpy arrays of any float dtype and the masks of :mod:`flashattn_core.masks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .masks import lower

if TYPE_CHECKING:
    import numpy as np


def reference_attention(
    query: Any, key: Any, value: Any, scale: float | None = None, mask: Any = None, *,
    softcap: float | None = None, sinks: Any = None, alibi_slopes: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(out, lse) of :func:`flash_attention` for the same arguments, in float64."""
    import numpy as np

    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    group = query.shape[-3] // key.shape[-3]
    key, value = np.repeat(key, group, axis=-3), np.repeat(value, group, axis=-3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale

    visible, bias = visible_and_bias(query.shape, key.shape[-2], mask)
    with np.errstate(invalid="ignore", over="ignore"):
        scores = query @ np.swapaxes(key, -1, -2) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if alibi_slopes is not None:
            slopes = np.asarray(alibi_slopes, dtype=np.float64)[:, None, None]
            scores = scores - slopes * np.abs(_distance(query.shape[-2], key.shape[-2]))
        scores = np.where(visible, scores + bias, -np.inf)

    sees_any = visible.any(axis=-1, keepdims=True)
    row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sinks = np.asarray(sinks, dtype=np.float64)[:, None, None]
        row_max = np.maximum(row_max, sinks)
    row_max = np.where(sees_any, row_max, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.where(visible, np.exp(scores - row_max), 0)
        row_sum = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            row_sum = row_sum + np.exp(sinks - row_max)
        weights = weights / np.where(sees_any, row_sum, 1)
        lse = np.where(sees_any, row_max + np.log(np.where(sees_any, row_sum, 1)), -np.inf)[..., 0]
        # A hidden key adds nothing, whatever its value is.
        finite_value = np.where(np.isfinite(value), value, 0)
        out = weights @ finite_value
        for hit in np.argwhere(~np.isfinite(value).all(axis=-1)):
            *head, j = hit
            row_value = value[*head, j]
            reaches = visible[*head, :, j, None] & ~np.isfinite(row_value)
            out[*head] += np.where(reaches, weights[*head, :, j, None] * row_value, 0)
    return out, lse


def visible_and_bias(query_shape: tuple[int, ...], key_len: int, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mask as arrays of the scores' shape: what is visible (bool), and what is added to it."""
    import numpy as np

    *batch, heads, length, _ = query_shape
    m = lower(mask)
    visible = np.ones((*batch, heads, length, key_len), dtype=bool)
    bias = np.zeros(visible.shape)
    distance = _distance(length, key_len)
    columns = np.arange(key_len)
    if m.causal:
        visible &= distance >= 0
    if m.window:
        visible &= distance < m.window
    if m.key_start is not None:
        visible &= columns >= np.asarray(m.key_start)[..., None, None, None]
    if m.key_stop is not None:
        visible &= columns < np.asarray(m.key_stop)[..., None, None, None]
    if m.tree is not None:
        bits = np.asarray(m.tree)
        size = bits.shape[-2]
        nodes = (bits[..., columns[:size] // 32] >> (columns[:size] % 32).astype(np.uint32) & 1).astype(bool)
        tree = np.zeros((*bits.shape[:-2], length, size), dtype=bool)
        tree[..., max(0, length - size) :, :] = nodes[..., max(0, size - length) :, :]
        visible[..., key_len - size :] &= tree[..., None, :, :]
    if m.visible is not None:
        visible &= np.asarray(m.visible)
    if m.bias is not None:
        added = np.asarray(m.bias.astype(mx.float32), dtype=np.float64)
        visible &= added != -np.inf
        bias = np.where(added == -np.inf, 0, added) + bias
    return visible, bias


def _distance(length: int, key_len: int) -> np.ndarray:
    import numpy as np

    return np.arange(length)[:, None] + key_len - length - np.arange(key_len)[None, :]
