"""With when="faster": which calls mlx-lm's own attention computes, since that is faster here.

A decision is made once for calls of one kind, whose keys are of one magnitude: a decode step looks it up.
"""

from typing import Any

import mlx.core as mx
from flashattn_core import _ext, tuned
from flashattn_core.attention import lowered
from flashattn_core.masks import And, SlidingWindow
from flashattn_core.tuned import Measured

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
    mask: Any,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    **storage: Any,
) -> str | None:
    """Why mlx-lm's own attention is to compute such a call; None where flash attention is.

    The arguments are those of flash_attention() or, with bits and group_size as storage, of its quantised twin.
    """
    sizes = _ext.likeness(queries, keys[0] if storage else keys)
    kind = (sizes, None if mask is None else _of(mask), sinks is None, softcap is None, storage.get("bits"))
    try:
        return _reasons[kind]
    except KeyError:
        arguments = lowered(queries, keys, values, None, mask, sinks=sinks, softcap=softcap, **storage)
        return _reasons.setdefault(kind, _reason(arguments))


def _of(mask: Any) -> Any:
    """What a decision takes of it: a window's length, and of what kind masks are."""
    if isinstance(mask, And):
        return tuple(map(_of, mask.parts))
    return mask.window if isinstance(mask, SlidingWindow) else type(mask)


def _reason(arguments: _ext.Arguments) -> str | None:
    table = _table()
    if table is None:
        return None
    measured = tuned.nearest(table, tuned.call_of(arguments))
    if measured is None:
        return NOT_MEASURED
    kernel, _ = _ext.plan(arguments, _ext.backend_of(mx.default_device()))
    return None if measured.is_worth_it(kernel) else FASTER_THERE
