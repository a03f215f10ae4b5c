"""Routes an attention call to flash attention or, with the reason counted, to the original function.

The patch's functions, in mx_fast.py and mlx_lm_functions.py, first try `plain_call()`, which is quick and handles most
calls, and then `attend()`, which decides about all others.
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
MLX_LM_BASE = "mlx_lm.models.base"  # its functions pass on a model's calls


class FlashFallbackWarning(UserWarning):
    """A call was not flash attention, or a function was not replaced; the text says why. Given once for each reason."""


class FlashFallbackError(RuntimeError):
    """With strict=True: a call was not flash attention; the text says why."""


@dataclass
class State:
    """The settings of enable() and enabled() blocks that a call reads."""

    on: bool = False
    strict: bool = False
    precision: Precision = "input"
    may_round: bool = True  # whether plain_call() may round probabilities, as "input" does
    observed: bool = False  # whether an observed() block is open
    outermost: bool = False  # whether mx.fast has the patch's function, unwrapped
    fallbacks: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, on: bool, strict: bool, precision: Precision) -> None:
        self.on, self.strict, self.precision = on, strict, precision
        self.may_round = precision == "input"


observers: list[Callable[[_ext.Arguments], None]] = []
state = State()
# True in a call of a model given to patch_model(), False while a fallback is computed, None: state.on decides.
here: ContextVar[bool | None] = ContextVar("mlxlm_flash_patch: whether attention is flash attention", default=None)


def is_active() -> bool:
    """Whether a call made now should be flash attention."""
    marked = here.get()
    return state.on if marked is None else marked


@contextmanager
def active(mark: bool) -> Iterator[None]:
    """Inside the block, is_active() returns `mark` in this thread and its tasks."""
    before = here.get()
    try:  # Ctrl-C may come after either line
        here.set(mark)
        yield
    finally:
        here.set(before)


def plain_call(query: Any, key: Any, value: Any, scale: Any, mask: Any, sinks: Any) -> Any:
    """Flash attention for most calls, with little Python: the rest is one call into C++.

    False if MLX's own attention is faster here. None if the patch is off or the call needs attend().
    """
    rounds, marked = state.may_round, here.get()
    if state.observed or not (state.on if marked is None else marked):  # is_active() inlined, to save time
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
    """Flash attention; None if MLX's own attention is faster here.

    Args:
      storage: {"group_size", "bits"} if key and value are a quantised cache's tuples; else None.

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
    """Returns the result of `flash`, which calls attend(), or else of `original`, the replaced function.

    It calls `original` while the patch is off, where MLX's own attention is faster, and for calls that flash attention
    cannot compute. Only the latter count as fallbacks; the warning names `whose` attention computed them. Bad arguments
    raise the error of `original`, and are not counted.
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
    """Counts a fallback, and warns of the first for this reason. Raises FlashFallbackError if strict."""
    with state.lock:
        state.fallbacks[reason] += 1
        first = state.fallbacks[reason] == 1
    if state.strict:
        raise FlashFallbackError(f"strict: flash attention cannot compute this call: {reason}")
    if first:
        message = f"{whose} attention computed this call, because: {reason} (warned once; status() counts every call)"
        warnings.warn(message, FlashFallbackWarning, stacklevel=2 + frames_of_libraries(sys._getframe(1)))


def frames_of_libraries(frame: FrameType | None) -> int:
    """How many frames, from this one up, belong to this package or to mlx-lm's base module, not to the program."""
    count = 0
    while frame is not None and (
        os.path.dirname(frame.f_code.co_filename) == os.path.dirname(__file__)
        or frame.f_globals.get("__name__") == MLX_LM_BASE
    ):
        count, frame = count + 1, frame.f_back
    return count


@contextmanager
def observed(observe: Callable[[_ext.Arguments], None]) -> Iterator[None]:
    """Inside the block, attend() gives `observe` the arguments of each flash attention call, of any thread."""
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
    """Raises NoKernelError if no kernel covers the call, or its gradient if the call is traced.

    mx.grad, mx.vmap and mx.compile trace calls alike, so each traced call counts as one that needs a gradient.
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
    """The largest head_dim on the default device, of forward or gradient kernels; 0 if there are none."""
    return flashattn_core.max_head_dim(gradient=gradient, quantised=quantised)


def _in_one_dtype(query: mx.array, key: Any, value: Any, storage: dict[str, int] | None) -> tuple[mx.array, Any, Any]:
    """Casts query, key and value to one dtype, as MLX does: some models compute only query and key in float32.

    A quantised cache's tuples (weights, scales, biases) stay as they are; the dtype of their scales counts.
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
