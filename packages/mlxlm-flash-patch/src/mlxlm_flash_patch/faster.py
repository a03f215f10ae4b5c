"""With when="faster": which calls mlx-lm's own attention computes, since that is faster here.

A decision is made once for calls of one kind, whose keys are of one magnitude: a decode step looks it up.
"""

from typing import Any

import mlx.core as mx
from flashattn_core import _ext, is_tracing, tuned
from flashattn_core.arguments import lowered
from flashattn_core.masks import And, SlidingWindow
from flashattn_core.tuned import Measured

from .obstacles import in_one_dtype, is_quantised, reason_not_to

FASTER_THERE, NOT_MEASURED = "it is faster there", "nothing like them was measured"

_reasons: dict[Any, str | None] = {}


def check() -> None:
    """Makes decisions anew. Raises ValueError where nothing tells what is faster: on a GPU that has no table."""
    _reasons.clear()
    tuned.forget()
    if (table := _table()) is not None and not table:
        name = tuned.software(mx.default_device())["device"]
        raise ValueError(f"[enable] when is 'faster', and nothing was measured on {name}: run mlxlm-flash tune once")


def _table() -> list[Measured] | None:
    """None on the CPU: MLX's own attention has no kernel there, and nothing is left to it."""
    device = mx.default_device()
    return None if device == mx.cpu else tuned.here(device)


def reason_to_leave(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    mask: Any,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> str | None:
    """Why mlx-lm's own attention is to compute such a call, since it is faster; None where it is not.

    The arguments are those of mlx-lm's attention; the mask may be a description. A call that is traced is not left: a
    gradient may be wanted, which was not measured. Nor is one that cannot be flash attention: that is a fallback. Nor
    is what mlx-lm's own attention cannot compute.
    """
    if mask is not None and isinstance(mask, mx.array) and is_tracing(mask):
        return None
    bits = cache.bits if is_quantised(cache) else 0
    likeness = _ext.likeness(queries, keys[1] if bits else keys, values[1] if bits else values, sinks)
    if not likeness:
        return None
    kind = (likeness, mask if mask is None else _of(mask), softcap is None, bits)
    try:
        return _reasons[kind]
    except KeyError:
        reason = _reason(queries, keys, values, cache, mask, sinks, softcap)
    return _reasons.setdefault(kind, reason)


def mlx_lm_cannot(queries: mx.array, quantised: bool, sinks: mx.array | None) -> bool:
    """Whether mlx-lm's own attention refuses such a call, or computes something else.

    It refuses other ranks than 4, and sinks beside quantised keys. MLX 0.32.4's CUDA build refuses quantised keys that
    do not fill their cache's memory. Where they do, it gives all heads of queries the first head's keys.
    `test_models.py` among the tests for CUDA waits for the cure. On the CPU of such a machine nothing is left anyway.
    """
    return queries.ndim != 4 or (quantised and (sinks is not None or mx.cuda.is_available()))


def _of(mask: Any) -> Any:
    """What a decision takes of it: a window's length, and of what kind masks are."""
    if isinstance(mask, And):
        return tuple(map(_of, mask.parts))
    return mask.window if isinstance(mask, SlidingWindow) else type(mask)


def _reason(queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any, sinks: Any, softcap: Any) -> str | None:
    table = _table()
    queries, keys, values = in_one_dtype(queries, keys, values)
    quantised = is_quantised(cache)
    if table is None or mlx_lm_cannot(queries, quantised, sinks):
        return None
    if reason_not_to(queries, keys, values, cache, mask, sinks) is not None:
        return None
    storage = {"group_size": cache.group_size, "bits": cache.bits} if quantised else {}
    arguments = lowered(queries, keys, values, None, mask, sinks=sinks, softcap=softcap, **storage)
    kernel, _ = _ext.plan(arguments, _ext.backend_of(mx.default_device()))  # checks the arguments
    if kernel is None:
        return None
    measured = tuned.nearest(table, tuned.call_of(arguments))
    if measured is None:
        return NOT_MEASURED
    return None if measured.is_worth_it(kernel) else FASTER_THERE
