"""One call's way: flash attention, or mlx-lm's own function with the reason counted, never silently."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import mlx.core as mx
from flashattn_core import NoKernelError, flash_attention, quantized_flash_attention
from flashattn_core._ext import Arguments
from flashattn_core.attention import lowered

from .described_masks import description_of
from .faster import FASTER_THERE, NOT_MEASURED, reason_to_leave
from .obstacles import check_storage, in_one_dtype, is_quantised, reason_not_to

Attention = Callable[..., mx.array]
Way = Callable[[], bool]  # whether a call that is made now is to be flash attention


class FlashFallbackWarning(UserWarning):
    """A call went to mlx-lm's own attention; the text says why. Given once for each reason."""


class FlashFallbackError(RuntimeError):
    """With strict=True: a call would have gone to mlx-lm's own attention; the text says why."""


class Left:
    """How many calls when="faster" left to mlx-lm's own attention, by reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            # A step of these is one of the interpreter's: a lock would take a decode step as long as its decision.
            self.counts = {reason: count() for reason in (FASTER_THERE, NOT_MEASURED)}
            self._looks = 0

    def now(self) -> dict[str, int]:
        with self._lock:
            counted = {reason: next(each) - self._looks for reason, each in self.counts.items()}
            self._looks += 1  # which are steps, too
        return {reason: number for reason, number in counted.items() if number}


@dataclass
class Route:
    """What patch.py decides and a call reads."""

    open: bool = False
    strict: bool = False
    faster: bool = False
    fallbacks: Counter[str] = field(default_factory=Counter)
    left: Left = field(default_factory=Left)
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
    """Flash attention; None where the caller is to do without, which is counted and warned about here."""
    check_storage(keys, values, cache)
    if mask is not None and isinstance(mask, mx.array):
        mask = description_of(mask, queries, (keys if isinstance(keys, mx.array) else keys[0]).shape[-2])
    if route.faster and not _in_a_patched_model.get():  # first: what is left costs hardly more than unpatched
        reason = reason_to_leave(queries, keys, values, cache, mask, sinks, softcap)
        if reason is not None:
            next(route.left.counts[reason])
            return None
    queries, keys, values = in_one_dtype(queries, keys, values)
    reason = reason_not_to(queries, keys, values, cache, mask, sinks)
    if reason is None:
        storage = {"group_size": cache.group_size, "bits": cache.bits} if is_quantised(cache) else {}
        for observe in _observers:
            observe(lowered(queries, keys, values, scale, mask, softcap=softcap, sinks=sinks, **storage))
        try:
            attention: Attention = quantized_flash_attention if storage else flash_attention
            return attention(queries, keys, values, scale, mask, softcap=softcap, sinks=sinks, **storage)
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
