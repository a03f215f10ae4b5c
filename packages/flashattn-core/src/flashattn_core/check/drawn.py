"""Draws random arguments for a call."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .. import _ext
from ..masks import And, Causal, KeyRange, Mask, SlidingWindow, Tree

Named = dict[str, Any]
Given = dict[str, Any]  # see _ext.Call.given

# With one of these masks, drawn() hides one key from all rows. A causal mask alone shows that key to the last row.
HIDES = ("causal", "key_start", "key_stop", "visible", "bias")


def drawn(
    call: _ext.Call,
    query_len: int,
    key_len: int,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    hidden_nan: bool = False,
    stream: mx.Stream | mx.Device | mx.DeviceType = mx.cpu,
) -> Named:
    """Random arguments of flash_attention() or of the quantised op. MLX's global random state does not change.

    hidden_nan: whether the hidden key (see HIDES) and the hidden value are NaN.
    """
    given: Given = call.given
    with mx.stream(stream):
        keys = iter(mx.random.split(mx.random.key(query_len), 16))

        def numbers(*shape: int, dtype: mx.Dtype = call.dtype) -> mx.array:
            # The variance is about 1. uniform() is faster than normal().
            return mx.random.uniform(-1.7, 1.7, shape, key=next(keys)).astype(dtype)

        heads = kv_heads * (call.heads // call.kv_heads)
        query = numbers(batch, heads, query_len, call.head_dim)
        key = numbers(batch, kv_heads, key_len, call.head_dim)
        value = numbers(batch, kv_heads, key_len, call.value_dim)
        if hidden_nan:
            at_the_beginning = "key_start" in given or "window" in given
            hidden = mx.arange(key_len)[:, None] == (0 if at_the_beginning else key_len - 1)
            key, value = (mx.where(hidden, mx.nan, x).astype(call.dtype) for x in (key, value))
        named: Named = {"query": query, "key": key, "value": value}
        if call.bits:
            how: Named = {"bits": call.bits, "group_size": call.group_size}
            for name in ("key", "value"):
                named[name] = mx.quantize(named[name].astype(given["key_scales"]), **how)
            named |= how
        if mask := _mask(given, (batch, 1, query_len, key_len), numbers, next(keys)):
            named["mask"] = mask
        if "softcap" in given:
            named["softcap"] = 1e31 if "extreme_softcap" in given else 5.0  # GPU kernels have a program for each
        # Slopes are small, because rounding a score in the hundreds would exceed the allowed error.
        for name, most in (("sinks", 1), ("alibi_slopes", 1 / 16)):
            if name in given:
                named[name] = mx.abs(numbers(heads, dtype=given[name])) * most
        mx.eval(named)
        return named


def _mask(given: Given, scores: tuple[int, ...], numbers: Callable[..., mx.array], random: mx.array) -> Mask | None:
    batch, _, query_len, key_len = scores
    parts: list[Any] = []
    if "window" in given:
        # With few queries the window is 5/6 of the keys, so that kernels split these into chunks.
        parts.append(SlidingWindow(21 if query_len > 16 else key_len * 5 // 6))
    elif "causal" in given:
        parts.append(Causal())
    if "key_start" in given or "key_stop" in given:
        row = mx.arange(batch)
        parts.append(KeyRange(1 + 5 * row, key_len - 1 - 7 * row if "key_stop" in given else None))
    if "tree" in given:
        nodes = min(query_len, 5)
        parts.append(Tree(mx.tri(nodes, dtype=mx.float32) * (numbers(batch, nodes, nodes) < 1) > 0))
    seen = (mx.arange(key_len) > 0) & (mx.arange(key_len) < key_len - 1)
    if "visible" in given:
        parts.append((mx.random.uniform(shape=scores, key=random) < 0.7) & seen)
    if "bias" in given:
        parts.append(mx.where(seen, numbers(*scores), -mx.inf).astype(given["bias"]))
    return And(tuple(parts)) if parts else None
