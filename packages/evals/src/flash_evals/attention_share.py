"""Attention's share of the time, found in a trial of its own in which nobody runs ahead.

MLX is lazy: a call of attention only notes what is to be computed, and later everything is computed in one go. Here
what goes into a call is waited for before the clock starts, and what comes out of it before the clock stops. Masks are
not: flash attention does without most of them, so an array that is computed for attention alone is attention's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlxlm_flash_patch.direct import GLOBAL, StandIn
from mlxlm_flash_patch.places import Place, places
from mlxlm_flash_patch.registry import is_mlx_lm

from flash_evals.measure import Arm, Flash, run

Attention = Callable[..., mx.array]


@dataclass
class Stopwatch:
    seconds: float = 0.0
    calls: int = 0


def attention_share(name: Arm, work: Callable[[], object]) -> float | None:
    """Does the work once under one arm: the part of its time, 0 to 1, that calls of attention took.

    None if there was no call at a place where attention stands alone: Gemma 2's, with its projections, does not.
    """
    watch = Stopwatch()

    def watched() -> None:
        with watching(watch):
            work()

    _, trial = run(name, watched, Flash())
    return watch.seconds / trial.seconds if watch.calls else None


@contextmanager
def watching(watch: Stopwatch) -> Iterator[None]:
    """Every call of attention in mlx-lm's models is timed, be it mlx-lm's own or what the patch has put there."""
    held = [(place, place.held) for place in places() if _is_attention(place)]
    try:
        for place, attention in held:
            place.put(_watched(place, attention, watch))
        yield
    finally:
        for place, attention in held:
            place.put(attention)


def _is_attention(place: Place) -> bool:
    makes_masks, whole_layer = place.for_all, place.attribute == "__call__"
    return is_mlx_lm(place.module) and not makes_masks and not whole_layer


def _watched(place: Place, held: Any, watch: Stopwatch) -> object:
    if place.attribute != GLOBAL:
        return _timed(held, watch)
    fast = StandIn(held.fast, scaled_dot_product_attention=_timed(held.fast.scaled_dot_product_attention, watch))
    return StandIn(held, fast=fast)


def _timed(attention: Attention, watch: Stopwatch) -> Attention:
    def waited_for(*arguments: Any, **others: Any) -> mx.array:
        mx.eval(arguments[:4])  # query, key and value, also behind a `self`; what is no array is passed over
        start = time.perf_counter()
        output = attention(*arguments, **others)
        mx.eval(output)
        watch.seconds += time.perf_counter() - start
        watch.calls += 1
        return output

    return waited_for
