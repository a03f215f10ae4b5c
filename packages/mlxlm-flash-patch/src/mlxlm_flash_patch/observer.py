"""Who wants to see the calls of attention in mlx-lm's models, whoever computes them, stands around each of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .direct import GLOBAL, StandIn
from .places import Place, places
from .registry import is_mlx_lm

Attention = Callable[..., mx.array]


@contextmanager
def observe(observer: Callable[..., mx.array]) -> Iterator[None]:
    """In the block each call of attention in the modules of mlx-lm that are imported goes through `observer`.

    It gets the function that computes attention, which is mlx-lm's own or what the patch has put there, and the call's
    arguments as they came: query, key and value, `(B, H, L, D)` or quantised, are among the first four, behind a
    `self` where there is one. It returns what the function gives for them, `(B, H_q, L_q, D_v)`. Attention that is
    written out in one with its projections (Gemma 2) is not seen. Within the block the patch must not be switched.

        def counted(attention, *arguments, **others):
            calls.append(attention)
            return attention(*arguments, **others)

        with flash.observe(counted):
            model(tokens)
    """
    held = [(place, place.held) for place in places() if _is_attention(place)]
    try:
        for place, attention in held:
            place.put(_observed(place, attention, observer))
        yield
    finally:
        for place, attention in held:
            place.put(attention)


def _is_attention(place: Place) -> bool:
    makes_masks, whole_layer = place.for_all, place.attribute == "__call__"
    return is_mlx_lm(place.module) and not makes_masks and not whole_layer


def _observed(place: Place, held: Any, observer: Callable[..., mx.array]) -> object:
    if place.attribute != GLOBAL:
        return _around(held, observer)
    fast = StandIn(held.fast, scaled_dot_product_attention=_around(held.fast.scaled_dot_product_attention, observer))
    return StandIn(held, fast=fast)


def _around(attention: Attention, observer: Callable[..., mx.array]) -> Attention:
    def observed(*arguments: Any, **others: Any) -> mx.array:
        return observer(attention, *arguments, **others)

    return observed
