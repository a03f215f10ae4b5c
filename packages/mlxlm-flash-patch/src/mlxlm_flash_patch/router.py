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
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import flashattn_core
import mlx.core as mx
from flashattn_core import NoKernelError, _ext
from flashattn_core.argument_types import describe, integer
from flashattn_core.arguments import Precision, lowered
from flashattn_core.masks import for_quick

from . import mlx_own
from .described_masks import description_of

Function = Callable[..., mx.array]
_NAME = "[scaled_dot_product_attention]"
_OWN_FOLDER = os.path.join(os.path.dirname(__file__), "")
MLX_LM_BASE = "mlx_lm.models.base"  # the module whose functions most models call for attention


class FlashFallbackWarning(UserWarning):
    """Warns, once for each reason, that a call fell back or that a function was not replaced."""


class BadCallError(TypeError, ValueError):
    """A call that MLX must not get: its error would not say what is wrong, or the process would end."""


class FlashFallbackError(RuntimeError):
    """Raised with strict=True for a call that flash attention cannot compute. The text says why."""


@dataclass
class State:
    """Each attention call reads these settings. enable(), disable() and enabled() blocks change them."""

    on: bool = False
    strict: bool = False
    precision: Precision = "input"
    outermost: bool = False  # whether mx.fast has the patch's function itself, not another library's wrapper of it
    fallbacks: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards `fallbacks`


state = State()
_plans = ContextVar[list[_ext.Choice] | None]("mlxlm_flash_patch: of a trial() block", default=None)
in_model = ContextVar("mlxlm_flash_patch: whether a call of a model given to patch_model() runs", default=False)


def is_active() -> bool:
    """Whether a call made now should be flash attention."""
    return state.on or in_model.get()


@contextmanager
def setting(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Inside the block, the variable has this value in this thread or asyncio task."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def active() -> AbstractContextManager[None]:
    """Inside the block, is_active() returns True in this thread or asyncio task."""
    return setting(in_model, True)


@contextmanager
def trial() -> Iterator[list[_ext.Choice]]:
    """Inside the block, this thread's flash attention calls are planned, not computed. Yields the list of their plans.

    The outputs are zeros, so that a model can be called to see what its attention needs.
    """
    plans: list[_ext.Choice] = []
    with setting(_plans, plans):
        yield plans


def plain_call(
    query: Any, key: Any, value: Any, scale: Any, mask: Any, sinks: Any, group_size: Any = 0, bits: Any = 0
) -> mx.array | None:
    """Computes most attention calls with a single call into C++, which may leave the call to MLX's own attention.

    Returns None if the patch is off or the call needs attend(). With `bits`, key and value are a quantised cache's.
    """
    if not (state.on or in_model.get()) or _plans.get() is not None:  # is_active() inlined, to save time
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
            raise BadCallError(f"{_NAME} {name} of the KV cache is {describe(given)}, expected a whole number")
    query, key, value = _in_one_dtype(query, key, value, storage)
    if scale is None:  # as for flash_attention(), but MLX's function has no default
        raise TypeError(f"{_NAME} scale is None, expected a number")
    mlx_mask, mask = mask, description_of(mask, query, (key[0] if storage else key).shape[-2])
    options: Any = {"sinks": sinks, "softcap": softcap, "precision": state.precision, **(storage or {})}
    call = lowered(query, key, value, scale, mask, **options)
    _require_gradient(call.call)
    plans = _plans.get()
    if plans is None:
        out: mx.array = _ext.attention(call, False, None, mlx_own.mlx_attention, mlx_mask)
        return out
    plans.append(_ext.plan(call, _ext.backend_of(mx.default_device())))
    return mx.zeros((*query.shape[:-1], call.call.value_dim), query.dtype)


def flash_or(original: Callable[[], mx.array], flash: Callable[[], mx.array], whose: str = "mlx-lm's own") -> mx.array:
    """Returns the result of `flash`, which calls attend(), or of `original`, which calls the replaced function.

    `original` is called if the patch is off, or if `flash` raises an error other than BadCallError, which is a
    fallback. The first fallback for each reason warns that `whose` attention computed the call. Under strict, every
    fallback raises FlashFallbackError. If `original` raises, too, the arguments are bad: no fallback is counted.
    """
    if not is_active():
        return original()
    try:
        return flash()
    except BadCallError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = str(error).removeprefix("[flash_attention] ")
    try:
        out = original()
    except Exception as error:
        error.add_note(f"flash attention cannot compute this call either: {reason}")
        raise
    with state.lock:
        state.fallbacks[reason] += 1
        first = state.fallbacks[reason] == 1
    if state.strict:
        raise FlashFallbackError(f"strict: flash attention cannot compute this call: {reason}")
    if first:
        warn(f"{whose} attention computed this call, because: {reason} (warned once; status() counts every call)")
    return out


def warn(message: str) -> None:
    """Warns with a FlashFallbackWarning that names the line of the program that called this package or mlx-lm."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and (
        frame.f_code.co_filename.startswith(_OWN_FOLDER)
        or frame.f_globals.get("__name__") in (MLX_LM_BASE, "contextlib")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, FlashFallbackWarning, stacklevel=level)


def _require_gradient(call: _ext.Call) -> None:
    """Raises NoKernelError if a call is traced whose gradient no kernel computes.

    The patch cannot tell whether mx.grad, mx.vmap or mx.compile traces the call.
    """
    if call.is_traced:
        most = 0 if call.bits else flashattn_core.max_head_dim(gradient=True)
        if max(call.head_dim, call.value_dim) > most:
            where = f"on this device for a head_dim over {most}" if most else "on this device"
            where = "with a quantised KV cache" if call.bits else where
            raise NoKernelError(f"traced by mx.grad, mx.vmap or mx.compile: flash attention has no gradient {where}")


def _in_one_dtype(query: mx.array, key: Any, value: Any, storage: dict[str, int] | None) -> tuple[mx.array, Any, Any]:
    """Casts query, key and value to one dtype, as MLX does, because some models compute only query and key in float32.

    With a quantised cache, only the query is cast, to the common dtype of the query and the scales.
    """
    rows = (key[1], value[1]) if storage else (key, value)
    for name, given in zip(("query", "key", "value"), (query, *rows), strict=True):
        if not isinstance(given, mx.array):
            cure = ": this attention takes no quantised KV cache, so run it without --kv-bits"
            message = f"{name} is {describe(given)}, expected an array{cure if isinstance(given, list | tuple) else ''}"
            raise TypeError(f"{_NAME} {message}")
        if given.ndim != 4:  # flash attention takes other arrays, too, but MLX's function and mlx-lm's do not
            message = f"{name} has shape {given.shape}, expected (B, heads, length, dim)"
            raise ValueError(f"{_NAME} {message}")
    if rows[0].shape[1] == 0:
        raise BadCallError(f"{_NAME} key has 0 heads, expected at least 1")
    dtype = mx.result_type(query, *rows)
    return (query.astype(dtype), *((key, value) if storage else (key.astype(dtype), value.astype(dtype))))
