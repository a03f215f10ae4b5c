"""What a call of attention becomes: flash attention, or the function from before with the reason counted.

The functions that stand in place of MLX's and mlx-lm's are in mx_fast.py and mlx_lm_functions.py. They try
`plain_call()`, which is quick and takes most calls, and then `attend()`, which has the word on all others.
"""

import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import flashattn_core
import mlx.core as mx
from flashattn_core import NoKernelError, _ext
from flashattn_core.argument_types import describe
from flashattn_core.arguments import Precision, lowered
from flashattn_core.attention import flash_or_faster
from flashattn_core.masks import for_quick

from .described_masks import description_of

Function = Callable[..., mx.array]
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
MLX_LM_BASE = "mlx_lm.models.base"  # its functions hand on what a model asks for


class FlashFallbackWarning(UserWarning):
    """A call was not flash attention, or a function could not be exchanged; the text says why, once for each reason."""


class FlashFallbackError(RuntimeError):
    """With strict=True: a call was not flash attention; the text says why."""


@dataclass
class State:
    """What enable() and the blocks ask for, as a call reads it."""

    on: bool = False
    strict: bool = False
    precision: Precision = "input"
    may_round: bool = True  # whether plain calls may round as "input" does
    observed: bool = False  # whether somebody observes calls
    outermost: bool = False  # whether mx.fast has our function, and nobody else's over it
    fallbacks: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, on: bool, strict: bool, precision: Precision) -> None:
        self.on, self.strict, self.precision = on, strict, precision
        self.may_round = precision == "input"


observers: list[Callable[[_ext.Arguments], None]] = []
state = State()
# True in a call of a model that patch_model() was given, False where a fallback is computed; None: as `state` has it.
here: ContextVar[bool | None] = ContextVar("mlxlm_flash_patch: whether attention is flash attention", default=None)


def is_active() -> bool:
    """Whether a call that is made now is to be flash attention."""
    marked = here.get()
    return state.on if marked is None else marked


@contextmanager
def active(mark: bool) -> Iterator[None]:
    """Within, calls of this thread and its tasks are flash attention, or are not."""
    before = here.get()
    try:  # Ctrl-C may come behind either of the two
        here.set(mark)
        yield
    finally:
        here.set(before)


def plain_call(query: Any, key: Any, value: Any, scale: Any, mask: Any, sinks: Any) -> Any:
    """Flash attention for most calls, in the least time: all but this is one step in C++.

    False where MLX's own attention is faster here. None where the patch is off, or the call has to go the long way.
    """
    rounds, marked = state.may_round, here.get()
    if state.observed or not (state.on if marked is None else marked):  # is_active(), without the time of a call
        return None
    try:
        described = mask if mask is None else for_quick(description_of(mask, query, key.shape[-2]))
        return _ext.quick(query, key, value, scale, described, sinks, rounds, rounds)
    except (AttributeError, TypeError, ValueError):
        return None


def attend(
    query: mx.array,
    key: Any,
    value: Any,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    storage: dict[str, int] | None = None,
) -> mx.array | None:
    """Flash attention; None where MLX's own attention is faster here.

    Args:
      storage: group_size and bits, where key and value are the tuples of a quantised cache.

    Raises:
      NoKernelError: (a ValueError) the call cannot be flash attention; the text is the reason.
      TypeError, ValueError: bad arguments.
    """
    query, key, value = _in_one_dtype(query, key, value, storage)
    mask = description_of(mask, query, (key[0] if storage else key).shape[-2])
    _require_kernel(query, key, value, mask, sinks, storage)
    options: Any = {"sinks": sinks, "softcap": softcap, "precision": state.precision, **(storage or {})}
    call = lowered(query, key, value, scale, mask, **options)
    for observe in observers:
        observe(call)
    return flash_or_faster(call)


def flash_or(
    original: Callable[[], mx.array], flash: Callable[[], mx.array | None], whose: str = "mlx-lm's own"
) -> mx.array:
    """What `flash` gives, an `attend()`; else what `original` does, the function from before.

    `original` is called while the patch is off, where MLX's own attention is faster, and for a call that cannot be
    flash attention. The last is counted, and the warning names `whose` attention it was. Bad input has the error of
    `original`, and counts as nothing.
    """
    reason = None
    if is_active():
        try:
            out = flash()
            if out is not None:
                return out
        except (AttributeError, TypeError, ValueError) as error:
            reason = str(error)
    try:
        out = original()
    except Exception as error:
        if reason is not None:
            error.add_note(f"flash attention cannot compute this call either: {reason}")
        raise
    if reason is not None:
        fall_back(reason, whose)
    return out


def fall_back(reason: str, whose: str) -> None:
    """Counts a call that is not flash attention, and warns of the first for this reason. Raises under strict."""
    with state.lock:
        state.fallbacks[reason] += 1
        first = state.fallbacks[reason] == 1
    if state.strict:
        raise FlashFallbackError(f"strict: flash attention cannot compute this call: {reason}")
    if first:
        message = f"{whose} attention computed this call, because: {reason} (warned once; status() counts every call)"
        warnings.warn(message, FlashFallbackWarning, stacklevel=2 + frames_of_libraries(sys._getframe(1)))


def frames_of_libraries(frame: FrameType | None) -> int:
    """How many of the frames from this one on are not the program's: this package's, and mlx-lm's function's."""
    count = 0
    while frame is not None and (
        os.path.dirname(frame.f_code.co_filename) == os.path.dirname(__file__)
        or frame.f_globals.get("__name__") == MLX_LM_BASE
    ):
        count, frame = count + 1, frame.f_back
    return count


@contextmanager
def observed(observe: Callable[[_ext.Arguments], None]) -> Iterator[None]:
    """Within, `observe` is given the arguments of each call that is to be flash attention, of any thread."""
    try:
        with state.lock:
            observers.append(observe)
            state.observed = True
        yield
    finally:
        with state.lock:
            observers.remove(observe)
            state.observed = bool(observers)


def _require_kernel(
    query: mx.array, key: Any, value: Any, mask: Any, sinks: mx.array | None, storage: dict[str, int] | None
) -> None:
    """Raises NoKernelError for what the core takes without a gradient that the call may want, or says less well.

    While a function is traced, mx.grad, mx.vmap and mx.compile cannot be told apart: a traced call may want a gradient.
    """
    quantised = storage is not None
    head_dim = query.shape[-1] if quantised else max(query.shape[-1], value.shape[-1])
    device = mx.default_device().type
    if head_dim > (most := _max_head_dim(device, True, quantised)):
        if 0 < (forward := _max_head_dim(device, False, quantised)) < head_dim:
            raise NoKernelError(f"head_dim over {forward}")
        if flashattn_core.is_tracing(*[x for x in (query, key, value, mask, sinks) if isinstance(x, mx.array)]):
            where = f"on this device for a head_dim over {most}" if most else "on this device"
            where = "with a quantised KV cache" if quantised else where
            raise NoKernelError(f"traced by mx.grad, mx.vmap or mx.compile: flash attention has no gradient {where}")
    if query.dtype not in DTYPES:
        raise NoKernelError(f"dtype {str(query.dtype).removeprefix('mlx.core.')}")


@cache
def _max_head_dim(device: mx.DeviceType, gradient: bool, quantised: bool) -> int:
    """The most that a kernel takes on the default device, for the call or for its gradient; 0 where there is none."""
    return flashattn_core.max_head_dim(gradient=gradient, quantised=quantised)


def _in_one_dtype(query: mx.array, key: Any, value: Any, storage: dict[str, int] | None) -> tuple[mx.array, Any, Any]:
    """The three as MLX's attention casts them: some models compute query and key in float32, and value not.

    A quantised cache's tuples stay as they are; their scales, in the middle, have the dtype that the keys had.
    """
    rows = (key[1], value[1]) if storage else (key, value)
    for name, given in zip(("query", "key", "value"), (query, *rows), strict=True):
        if not isinstance(given, mx.array):
            cure = ": this attention takes no quantised KV cache, so run it without --kv-bits"
            message = f"{name} is {describe(given)}, expected an array{cure if isinstance(given, list | tuple) else ''}"
            raise TypeError(f"[scaled_dot_product_attention] {message}")
    dtype = query.dtype
    if rows[0].dtype == dtype and rows[1].dtype == dtype:
        return query, key, value
    dtype = mx.result_type(query, *rows)
    query = query.astype(dtype)
    return (query, key, value) if storage else (query, key.astype(dtype), value.astype(dtype))
