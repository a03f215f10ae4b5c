"""Models that call mx.fast.scaled_dot_product_attention themselves: in their module, `mx` is a stand-in for it.

The stand-in has one attribute of its own, `fast`, and that one function there; everything else is MLX's, looked
up when it is used.
"""

from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from .route import Way, attend

GLOBAL = "mx"  # the name by which mlx-lm's modules know mlx.core


class StandIn:
    """Another object, but for the attributes that are given."""

    def __init__(self, other: object, **instead: object) -> None:
        vars(self).update(instead, _other=other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)

    def __repr__(self) -> str:
        return f"<{self._other!r} with flash attention>"


def standing_in(original: Any, is_open: Way) -> StandIn:
    """What the patch puts in the place of MLX, in a module that calls MLX's attention itself."""

    def scaled_dot_product_attention(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
        force_fused: bool = False,
        stream: Any = None,
    ) -> mx.array:
        with nullcontext() if stream is None else mx.stream(stream):
            out = attend(q, k, v, None, scale, mask, sinks) if is_open() else None
            if out is None:
                own = original.fast.scaled_dot_product_attention
                out = own(q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused)
            return out

    fast = StandIn(original.fast, scaled_dot_product_attention=scaled_dot_product_attention)
    return StandIn(original, fast=fast)
