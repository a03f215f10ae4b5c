"""One call's way: flash attention, or mlx-lm's own function with the reason counted, never silently."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from flashattn_core import NoKernelError, _ext
from flashattn_core._ext import Arguments
from flashattn_core.arguments import Precision, lowered
from flashattn_core.attention import flash_or_faster
from flashattn_core.masks import quick

from .described_masks import description_of
from .obstacles import check_storage, in_one_dtype, is_quantised, reason_not_to

Attention = Callable[..., mx.array]
Way = Callable[[], bool]  # whether a call that is made now is to be flash attention


class FlashFallbackWarning(UserWarning):
    """A call went to mlx-lm's own attention; the text says why. Given once for each reason."""


class FlashFallbackError(RuntimeError):
    """With strict=True: a call would have gone to mlx-lm's own attention; the text says why."""


@dataclass
class Route:
    """What patch.py decides and a call reads."""

    open: bool = False
    strict: bool = False
    precision: Precision = "input"
    fallbacks: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


route = Route()
_observers: list[Callable[[Arguments], None]] = []
_in_a_patched_model: ContextVar[bool] = ContextVar("mlxlm_flash_patch: in a patched model", default=False)


def for_every_model() -> bool:
    """What enable() puts in place asks this. After disable() somebody may still hold it: then calls pass through."""
    return route.open or _in_a_patched_model.get()


def for_patched_models() -> bool:
    """What patch_model() puts in place asks this: the calls of other models pass through."""
    return _in_a_patched_model.get()


@contextmanager
def observed(observe: Callable[[Arguments], None]) -> Iterator[None]:
    """Within, `observe` is given the arguments of each call that is to be flash attention, of any thread."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def call_of_a_patched_model(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls the method of a model that was given to patch_model(): attention in it is flash attention."""
    before = _in_a_patched_model.get()
    try:  # Ctrl-C may come after either of the two: nothing is left behind
        _in_a_patched_model.set(True)
        return method(*arguments, **options)
    finally:
        _in_a_patched_model.set(before)


def routing(original: Attention, is_open: Way) -> Attention:
    """What the patch puts in the place of mlx-lm's function."""

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        out = attend(queries, keys, values, cache, scale, mask, sinks) if is_open() else None
        return original(queries, keys, values, cache, scale, mask, sinks) if out is None else out

    return scaled_dot_product_attention


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array | None:
    """Flash attention; None where the caller is to do without: MLX's own attention is faster here, or the call falls
    back, which is counted and warned about here."""
    if mask is not None and isinstance(mask, mx.array):
        mask = description_of(mask, queries, (keys if isinstance(keys, mx.array) else keys[0]).shape[-2])
    quantised = is_quantised(cache)
    rounds = route.precision == "input"
    if softcap is None and not quantised and not _observers:
        try:
            out = _ext.quick(queries, keys, values, scale, quick(mask), sinks, rounds, rounds)
        except ValueError:  # the long way finds out why
            out = None
        if out is not None:
            return None if out is False else out
    check_storage(keys, values, cache)
    queries, keys, values = in_one_dtype(queries, keys, values)
    reason = reason_not_to(queries, keys, values, cache, mask, sinks)
    if reason is None:
        options: dict[str, Any] = {"group_size": cache.group_size, "bits": cache.bits} if quantised else {}
        options |= {"softcap": softcap, "sinks": sinks, "precision": route.precision}
        call = lowered(queries, keys, values, scale, mask, **options)
        for observe in _observers:
            observe(call)
        try:
            return flash_or_faster(call)
        except NoKernelError as error:
            reason = str(error)
    _note_fallback(reason)
    return None


def _note_fallback(reason: str) -> None:
    with route.lock:
        route.fallbacks[reason] += 1
        first = route.fallbacks[reason] == 1
    if route.strict:
        raise FlashFallbackError(f"strict: this call would have gone to mlx-lm's own attention: {reason}")
    if first:
        message = f"not flash attention but mlx-lm's own: {reason} (said once, every call is counted)"
        # Points at the model's line: _note_fallback, attend and the function that is put in place lie between.
        warnings.warn(message, FlashFallbackWarning, stacklevel=4)
