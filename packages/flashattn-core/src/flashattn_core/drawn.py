"""Draws random calls, which `check.py` and `contest.py` run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from . import _ext
from .masks import And, Causal, KeyRange, Mask, SlidingWindow, Tree

Named = dict[str, Any]

_WINDOW, _SOFTCAP = 21, 5.0


@dataclass(frozen=True)
class Kind:
    """The properties of a call that kernels are compiled for. The batch size, for example, is not among them.

    `given` maps the names of optional inputs to dtypes, and the names of options to None. See csrc/call/inputs.def.
    """

    dtype: mx.Dtype
    head_dim: int
    value_dim: int
    group: int  # query heads per key/value head
    query_len: int
    given: Mapping[str, mx.Dtype | None] = field(default_factory=dict)
    bits: int = 0  # of quantised keys and values; 0: not quantised
    group_size: int = 0

    def hides(self) -> bool:
        """Whether drawn() hides one key from all rows. A causal mask alone shows that key to the last row."""
        bias = self.given.get("bias")
        if bias is not None and mx.issubdtype(bias, mx.floating):
            return True
        return not self.given.keys().isdisjoint(("causal", "key_start", "key_stop", "visible"))


def drawn(
    kind: Kind,
    query_len: int,
    key_len: int,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    window: int = 0,
    hidden_nan: bool = False,
    stream: mx.Stream | mx.Device | mx.DeviceType = mx.cpu,
) -> Named:
    """Random arguments of flash_attention() or of the quantised op. MLX's global random state does not change.

    window: 0 means _WINDOW. With few queries it means 5/6 of the keys, so that kernels split the keys into chunks.
    hidden_nan: whether the hidden key (see Kind.hides) and the hidden value are NaN.
    """
    given = kind.given
    window = window or (_WINDOW if query_len > _ext.few_queries else key_len * 5 // 6)
    with mx.stream(stream):
        keys = iter(mx.random.split(mx.random.key(query_len), 16))

        def numbers(*shape: int, dtype: mx.Dtype = kind.dtype) -> mx.array:
            # The variance is about 1. uniform() is faster than normal().
            return mx.random.uniform(-1.7, 1.7, shape, key=next(keys)).astype(dtype)

        heads = kv_heads * kind.group
        query = numbers(batch, heads, query_len, kind.head_dim)
        key = numbers(batch, kv_heads, key_len, kind.head_dim)
        value = numbers(batch, kv_heads, key_len, kind.value_dim)
        if hidden_nan:
            at_the_beginning = "key_start" in given or "window" in given
            hidden = mx.arange(key_len)[:, None] == (0 if at_the_beginning else key_len - 1)
            key, value = (mx.where(hidden, mx.nan, x).astype(kind.dtype) for x in (key, value))
        call: Named = {"query": query, "key": key, "value": value}
        if kind.bits:
            how: Named = {"bits": kind.bits, "group_size": kind.group_size}
            for name in ("key", "value"):
                call[name] = mx.quantize(call[name].astype(_dtype(given, "key_scales")), **how)
            call |= how
        mask = _mask(given, batch, query_len, key_len, window, numbers, next(keys))
        if mask is not None:
            call["mask"] = mask
        if "softcap" in given:
            call["softcap"] = _SOFTCAP
        # Slopes are small, because rounding a score in the hundreds would exceed the allowed error.
        for name, most in (("sinks", 1), ("alibi_slopes", 1 / 16)):
            if name in given:
                call[name] = mx.abs(numbers(heads, dtype=_dtype(given, name))) * most
        mx.eval(call)
        return call


def _mask(
    given: Mapping[str, mx.Dtype | None],
    batch: int,
    query_len: int,
    key_len: int,
    window: int,
    numbers: Callable[..., mx.array],
    random: mx.array,
) -> Mask | None:
    scores = (batch, 1, query_len, key_len)
    parts: list[Any] = []
    if "window" in given:
        parts.append(SlidingWindow(window))
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
        dtype, bias = _dtype(given, "bias"), numbers(*scores)
        bias = mx.where(seen, bias, -mx.inf) if mx.issubdtype(dtype, mx.floating) else mx.abs(bias)
        parts.append(bias.astype(dtype))
    return And(tuple(parts)) if parts else None


def _dtype(given: Mapping[str, mx.Dtype | None], name: str) -> mx.Dtype:
    dtype = given[name]
    assert dtype is not None, f"{name} is a flag"
    return dtype
