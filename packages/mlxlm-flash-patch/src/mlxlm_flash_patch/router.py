"""Routes each attention call to flash attention or to the original function, and counts the reasons for fallbacks.

`plain_call()` is quick and computes most calls. `attend()` decides about all others, such as calls with a quantised KV
cache or a softcap. The replacements in mx_fast.py and mlx_lm_functions.py call these two functions.
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
from types import FunctionType
from typing import Any

import flashattn_core
import mlx.core as mx
from flashattn_core import NoKernelError, _ext, storage
from flashattn_core.argument_types import describe, integer
from flashattn_core.arguments import Precision, lowered
from flashattn_core.masks import for_quick

from . import mlx_own
from .described_masks import description_of

Function = Callable[..., mx.array]
NAME = "[scaled_dot_product_attention]"
MLX_LM_BASE = "mlx_lm.models.base"  # the module whose functions most models call for attention


class FlashFallbackWarning(UserWarning):
    """Warns, once for each reason, that a call fell back or that a function was not replaced."""


class CacheError(TypeError):
    """No attention can compute the call, and MLX's error would list signatures without saying what is wrong."""


class FlashFallbackError(RuntimeError):
    """Raised with strict=True for a call that flash attention cannot compute. The text says why."""


@dataclass
class State:
    """Each attention call reads these settings. enable(), disable() and enabled() blocks change them."""

    on: bool = False
    strict: bool = False
    precision: Precision = "input"
    mx_attention: Any = None  # the patch's function for mx.fast, once it was made
    fallbacks: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards `fallbacks`


state = State()
observers: list[Callable[[_ext.Arguments], None]] = []  # one for each open observed() block
observing: dict[Any, Function] = {}  # each function of an open observe() block -> the function that it wraps
in_trial = ContextVar("mlxlm_flash_patch: whether a model is called only to see what attention reads", default=False)
in_model = ContextVar("mlxlm_flash_patch: whether a call of a model given to patch_model() runs", default=False)


def is_active() -> bool:
    """Whether a call made now should be flash attention."""
    return state.on or in_model.get()


def appended(cache: Any, keys: mx.array, values: mx.array, offset: int) -> tuple[Any, Any] | None:
    """Appends rows to a quantised cache by our kernel. Returns its keys and values, or None, having changed nothing."""
    if cache.keys is None or not is_active() or in_trial.get():  # a trial evaluates nothing
        return None
    return storage.append(cache.keys, cache.values, (keys, values), offset, cache.group_size, cache.bits)


def beneath(function: Any) -> Any:
    """Returns what the open observe() blocks wrap in `function`, or `function` itself."""
    while type(function) is FunctionType and (wrapped := observing.get(function)) is not None:
        function = wrapped
    return function


@contextmanager
def inside(variable: ContextVar[Any], value: Any = True) -> Iterator[None]:
    """Inside the block, the variable has the value in this thread or asyncio task."""
    before = variable.get()
    try:  # includes set(), because Ctrl-C may come right after set()
        variable.set(value)
        yield
    finally:
        variable.set(before)


def plain_call(
    query: Any, key: Any, value: Any, scale: Any, mask: Any, sinks: Any, group_size: Any = 0, bits: Any = 0
) -> mx.array | None:
    """Computes most attention calls with a single call into C++, which may leave the call to MLX's own attention.

    Returns None if the patch is off or the call needs attend(). With `bits`, key and value are a quantised cache's.
    """
    if observers or not (state.on or in_model.get()) or in_trial.get():  # is_active() inlined, to save time
        return None
    try:
        described, rounds = mask, state.precision == "input"
        if mask is not None and not isinstance(mask, str):
            described = for_quick(description_of(mask, query, (key[0] if bits else key).shape[-2]))
        own = mlx_own.mlx_attention
        return _ext.quick(query, key, value, scale, described, sinks, rounds, own, mask, group_size, bits)
    except (AttributeError, LookupError, TypeError, ValueError):
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
) -> mx.array:
    """Computes flash attention, or leaves the call to MLX's own attention if that is estimated to be faster.

    Args:
      storage: {"group_size", "bits"} if key and value are tuples of a quantised cache; else None.

    Raises:
      NoKernelError: (a ValueError) flash attention cannot compute this call; the text is the reason.
      TypeError, ValueError: bad arguments.
    """
    for name, given in (storage or {}).items():
        if integer(given) is None:
            raise CacheError(f"{NAME} {name} of the KV cache is {describe(given)}, expected a whole number")
    query, key, value = _in_one_dtype(query, key, value, storage)
    if scale is None:  # as for flash_attention(), but MLX's function has no default
        raise TypeError(f"{NAME} scale is None, expected a number")
    mlx_mask, mask = mask, description_of(mask, query, (key[0] if storage else key).shape[-2])
    _require_kernel(query, key, value, mask, sinks, storage)
    if in_trial.get():  # nothing is evaluated, and a kernel might have to be compiled for this call alone
        head_dim = value[0].shape[-1] * 32 // storage["bits"] if storage else value.shape[-1]
        return mx.zeros((*query.shape[:-1], head_dim), query.dtype)
    options: Any = {"sinks": sinks, "softcap": softcap, "precision": state.precision, **(storage or {})}
    call = lowered(query, key, value, scale, mask, **options)
    out: mx.array = _ext.attention(call, False, None, mlx_own.mlx_attention, mlx_mask)
    for observe in observers:
        observe(call)
    return out


def flash_or(original: Callable[[], mx.array], flash: Callable[[], mx.array], whose: str = "mlx-lm's own") -> mx.array:
    """Returns the result of `flash`, which calls attend(), or of `original`, which calls the replaced function.

    `original` is called if the patch is off, or if `flash` raises an error, which is a fallback. The first fallback for
    each reason warns that `whose` attention computed the call. Under strict, every fallback raises FlashFallbackError.
    If both `flash` and `original` raise, the arguments are bad. The caller then gets the error of `original`, except
    where `flash` raised a CacheError. No fallback is counted.
    """
    reason, is_bad_cache = None, False
    if is_active():
        try:
            return flash()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason, is_bad_cache = str(error), isinstance(error, CacheError)
    try:
        out = original()
    except Exception as error:
        if is_bad_cache:
            raise CacheError(reason) from error
        if reason is not None:
            error.add_note(f"flash attention cannot compute this call either: {reason}")
        raise
    if reason is None:
        return out
    with state.lock:
        state.fallbacks[reason] += 1
        first = state.fallbacks[reason] == 1
    if state.strict:
        raise FlashFallbackError(f"strict: flash attention cannot compute this call: {reason}")
    if first:
        warn(f"{whose} attention computed this call, because: {reason} (warned once; status() counts every call)")
    return out


def warn(message: str) -> None:
    """Warns with the line that called this package, mlx-lm's base module or contextlib."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(os.path.join(os.path.dirname(__file__), ""))
        or frame.f_globals.get("__name__") in (MLX_LM_BASE, "contextlib")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, FlashFallbackWarning, stacklevel=level)


@contextmanager
def observed(observe: Callable[[_ext.Arguments], None]) -> Iterator[None]:
    """Inside the block, all threads pass the arguments of each flash attention call to `observe`."""
    try:
        observers.append(observe)
        yield
    finally:
        observers.remove(observe)


def _require_kernel(
    query: mx.array, key: Any, value: Any, mask: Any, sinks: mx.array | None, storage: dict[str, int] | None
) -> None:
    """Raises NoKernelError if no kernel computes the call.

    A traced call needs a kernel for its gradient, too, because the patch cannot tell whether mx.grad, mx.vmap or
    mx.compile traces the call.
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
    if query.dtype not in (mx.bfloat16, mx.float16, mx.float32):
        raise NoKernelError(f"dtype {str(query.dtype).removeprefix('mlx.core.')}")


@cache
def _max_head_dim(device: mx.DeviceType, gradient: bool, quantised: bool) -> int:
    """The largest head_dim that kernels of the default device take, forward or backward; 0: there are no such kernels.

    `device` is the default device's type. It makes @cache keep one number for each device.
    """
    return flashattn_core.max_head_dim(gradient=gradient, quantised=quantised)


def _in_one_dtype(query: mx.array, key: Any, value: Any, storage: dict[str, int] | None) -> tuple[mx.array, Any, Any]:
    """Casts query, key and value to one dtype, as MLX does, because some models compute only query and key in float32.

    With a quantised cache, only the query is cast, to the common dtype of the query and the scales.
    """
    rows = (key[1], value[1]) if storage else (key, value)
    for name, given in zip(("query", "key", "value"), (query, *rows), strict=True):
        if not isinstance(given, mx.array):
            cure = ": this attention takes no quantised KV cache, so run it without --kv-bits"
            message = f"{name} is {describe(given)}, expected an array{cure if isinstance(given, list | tuple) else ''}"
            raise TypeError(f"{NAME} {message}")
        if given.ndim != 4:  # flash attention takes other arrays, too, but MLX's function and mlx-lm's do not
            raise ValueError(f"{NAME} {name} has shape {given.shape}, expected (B, heads, length, dim)")
    dtype = mx.result_type(query, *rows)
    return (query.astype(dtype), *((key, value) if storage else (key.astype(dtype), value.astype(dtype))))
