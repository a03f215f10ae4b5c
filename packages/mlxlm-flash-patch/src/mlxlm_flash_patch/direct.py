"""Models that call mx.fast.scaled_dot_product_attention themselves: in their module, `mx` is a stand-in for it.

The stand-in has one attribute of its own, `fast`, and that one function there; everything else is MLX's, looked
up when it is used.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import mlx.core as mx

from .route import attend

GLOBAL = "mx"  # the name by which mlx-lm's modules know mlx.core


class StandIn:
    """Another object, but for the attributes that are given."""

    def __init__(self, other: object, **instead: object) -> None:
        vars(self).update(instead, _other=other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)

    def __repr__(self) -> str:
        return f"<{self._other!r} with flash attention>"


def _with_flash(attend: Callable[..., mx.array]) -> StandIn:
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
        def own() -> mx.array:
            return mx.fast.scaled_dot_product_attention(
                q, k, v, scale=scale, mask=mask, sinks=sinks, force_fused=force_fused
            )

        with nullcontext() if stream is None else mx.stream(stream):
            return attend(q, k, v, None, scale, mask, sinks, own=own)

    fast = StandIn(mx.fast, scaled_dot_product_attention=scaled_dot_product_attention)
    return StandIn(mx, fast=fast)


routed_mx = _with_flash(attend)
instance_mx = _with_flash(partial(attend, always=True))
