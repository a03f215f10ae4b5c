"""Attention's share of the time, found in a trial of its own in which nobody runs ahead.

MLX is lazy: a call of attention only notes what is to be computed, and later everything is computed in one go. Here
what goes into a call is waited for before the clock starts, and what comes out of it before the clock stops. Masks are
not: flash attention does without most of them, so an array that is computed for attention alone is attention's.
"""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlxlm_flash_patch

from flash_evals.measure import Arm, Flash, run


def attention_share(name: Arm, work: Callable[[], object]) -> float | None:
    """Does the work once under one arm: the part of its time, 0 to 1, that calls of attention took.

    None if there was no call at a place where attention stands alone: Gemma 2's, with its projections, does not.
    """
    seconds: list[float] = []

    def timed(attention: Callable[..., mx.array], *arguments: Any, **others: Any) -> mx.array:
        mx.eval(arguments[:4])  # query, key and value, also behind a `self`; what is no array is passed over
        start = time.perf_counter()
        output = attention(*arguments, **others)
        mx.eval(output)
        seconds.append(time.perf_counter() - start)
        return output

    def watched() -> None:
        with mlxlm_flash_patch.observe(timed):
            work()

    _, whole = run(name, watched, 0, Flash())
    return sum(seconds) / whole.seconds if seconds else None
