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
from flashattn_core import NoKernelError, flash_attention, quantized_flash_attention
from flashattn_core._ext import Arguments
from flashattn_core.attention import lowered

from .described_masks import description_of
from .faster import reason_to_leave
from .obstacles import in_one_dtype, is_quantised, reason_not_to, traced

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
    faster: bool = False
    fallbacks: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)  # to mlx-lm's own attention, by when="faster"
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
    """Within, `observe` is given the arguments of each call that can be flash attention, of any thread."""
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
    queries, keys, values = in_one_dtype(queries, keys, values)
    reason = reason_not_to(queries, keys, values, cache, mask, sinks)
    if reason is None:
        storage = {"group_size": cache.group_size, "bits": cache.bits} if is_quantised(cache) else {}
        if isinstance(mask, mx.array):
            mask = description_of(mask, queries, (keys[0] if storage else keys).shape[-2])
        for observe in _observers:
            observe(lowered(queries, keys, values, scale, mask, softcap=softcap, sinks=sinks, **storage))
        if route.faster and _is_left(queries, keys, values, mask, sinks, softcap, storage):
            return None
        try:
            attention: Attention = quantized_flash_attention if storage else flash_attention
            return attention(queries, keys, values, scale, mask, softcap=softcap, sinks=sinks, **storage)
        except NoKernelError as error:
            reason = str(error)
    _note_fallback(reason)
    return None


def _is_left(
    queries: mx.array,
    keys: Any,
    values: Any,
    mask: Any,
    sinks: mx.array | None,
    softcap: float | None,
    storage: dict[str, int],
) -> bool:
    """Whether the call is mlx-lm's, which is counted; not if a gradient may be wanted, which was not measured."""
    reason = reason_to_leave(queries, keys, values, mask, sinks, softcap, **storage)
    if reason is None or _in_a_patched_model.get() or traced(queries, keys, values, mask, sinks):
        return False
    with route.lock:
        route.left[reason] += 1
    return True


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
