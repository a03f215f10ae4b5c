"""Put in, take out, for the whole process: through the globals of mlx-lm's modules.

Who wants the patch is a list of requests, one from enable() and one from each open enabled() block. After each
change of the list `_settle()` makes the modules match it, so that blocks may nest, end out of order and run in
several threads.
"""

import importlib
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import flashattn_core

from . import registry
from .places import Place, places
from .registry import BASE, SEAM, Models
from .route import Attention, FlashFallbackWarning, route, routed_attention


class FlashNeverRanError(RuntimeError):
    """With strict=True: the patch was on, and no flash attention kernel ran."""


@dataclass(eq=False)
class Request:
    """One wish for the patch."""

    modules: frozenset[str] | None  # None: all
    strict: bool
    from_enable: bool
    kernels_before: dict[str, int] = field(default_factory=flashattn_core.stats)

    def wants(self, name: str) -> bool:
        return self.modules is None or name in self.modules


_lock = threading.RLock()
_requests: list[Request] = []
_taken: dict[str, tuple[Place, object]] = {}  # by name: the place, and the object that was taken out of it
_kernels_before: dict[str, int] = {}  # flashattn_core.stats() when counting began


def enable(models: Models = None, strict: bool = False) -> None:
    """Routes mlx-lm's attention through flash attention, in this process, until disable().

    Args:
      models: None for every model, also those that are imported later; or a model type such as ``"qwen2"``,
        or a list of them: then only their modules are patched, and imported if need be.
      strict: a call that would fall back to mlx-lm's own attention raises FlashFallbackError, and disable()
        raises FlashNeverRanError if no kernel ran.

    A second enable() replaces the first: its `models` and `strict` hold from then on, and the counts go on.
    Places where another library's function sits are left alone, warned about and named by status().

    Raises:
      TypeError, ValueError: `models` has another type, is empty, or names something that cannot be patched.
      RuntimeError: mlx-lm's function has another signature than the one tested; both are named.
    In each case everything stays as it was.
    """
    request = _request(models, strict, from_enable=True)
    with _lock:
        previous = [r for r in _requests if r.from_enable]
        if previous:
            request.kernels_before = previous[0].kernels_before
        _admit(request, instead_of=previous)


def disable() -> None:
    """Takes the patch out: mlx-lm's own objects are back in every module, open enabled() blocks end early.

    Only where this package's function still sits: a place that someone else has overwritten meanwhile is left,
    warned about and named by status(). Models given to patch_model() stay patched. Without enable() it does
    nothing.

    Raises FlashNeverRanError, after everything is restored, if strict was asked for and no kernel ran since.
    Arrays are lazy: one that is not evaluated yet has not run.
    """
    _end(list(_requests))


@contextmanager
def enabled(models: Models = None, strict: bool = False) -> Iterator[None]:
    """The patch for the length of a block; takes and raises what enable() and disable() do.

    Blocks nest, in each other and in enable(): patched is what any of them wants, strict if any of them is, and
    the end of a block takes out only what no other wants.
    """
    request = _request(models, strict, from_enable=False)
    with _lock:
        _admit(request)
    try:
        yield
    except BaseException:
        request.strict = False  # the exception says more than that flash never ran
        raise
    finally:
        _end([request])


def kernel_calls() -> dict[str, int]:
    """Kernel → calls since counting began, without the kernels that never ran."""
    return _calls_since(_kernels_before)


def start_counting() -> None:
    """Calls and fallbacks count from here; each reason to fall back is warned about anew."""
    _kernels_before.clear()
    _kernels_before.update(flashattn_core.stats())
    with route.lock:
        route.fallbacks.clear()


def is_on() -> bool:
    return bool(_requests)


def patched_places() -> tuple[str, ...]:
    """The places that hold what the patch puts in now."""
    return tuple(place.name for place in places() if place.held is place.ours)


def foreign_places() -> dict[str, str]:
    """Place → what another library has put there."""
    return {place.name: _described(place.held) for place in places() if _is_foreign(place)}


def _is_foreign(place: Place) -> bool:
    held = place.held
    return registry.is_mlx_lm(place.module) and held is not place.ours and not place.is_original(held)


def _described(held: object) -> str:
    return f"{getattr(held, '__module__', '?')}.{getattr(held, '__qualname__', type(held).__qualname__)}"


def learn_original(original: Attention) -> None:
    """Makes `original` what fallbacks go to. Raises RuntimeError if its signature is not the tested one."""
    registry.check_signature(original, tested=routed_attention)
    route.original = original


def _request(models: Models, strict: bool, from_enable: bool) -> Request:
    """All that can fail, before anything is changed."""
    importlib.import_module(BASE)
    request = Request(registry.modules_of(models), strict, from_enable)
    for place in places():
        if not request.wants(place.module):
            continue
        if place.attribute == SEAM and place.is_original(place.held):
            learn_original(place.held)
        if _is_foreign(place):
            _warn(f"[enable] {place.name} holds {_described(place.held)}, not mlx-lm's own: left alone")
    return request


def _admit(request: Request, instead_of: Collection[Request] = ()) -> None:
    if not _requests:
        start_counting()
    _requests[:] = [r for r in _requests if r not in instead_of] + [request]
    _settle()


def _end(requests: list[Request]) -> None:
    """Withdraws the requests that are still in force, and then says what is to be said about them."""
    with _lock:
        ended = [r for r in requests if r in _requests]
        _requests[:] = [r for r in _requests if r not in ended]
        overwritten = _settle()
    for name, holder in overwritten.items():
        _warn(f"[disable] {name} was overwritten meanwhile by {holder}: left alone")
    if any(r.strict and not _calls_since(r.kernels_before) for r in ended):
        raise FlashNeverRanError("strict: flash attention never ran while it was enabled")


def _settle() -> dict[str, str]:
    """Makes the modules match the requests: the routed function where one wants it, else what was there before.

    Returns the places that should be given back and are someone else's by now.
    """
    route.open = bool(_requests)
    route.strict = any(r.strict for r in _requests)
    for place in places():
        held, wanted = place.held, _is_wanted(place)
        if wanted and registry.is_mlx_lm(place.module) and place.is_original(held):
            _taken[place.name] = place, held
            place.put(place.ours)
        elif not wanted and held is place.ours:
            # Imported while patched, if nothing was taken: there never was another object in this place.
            _, original = _taken.pop(place.name, (place, place.original()))
            place.put(original)
    left = [name for name, (place, _) in _taken.items() if not _is_wanted(place)]
    for name in left:
        del _taken[name]
    return {name: holder for name, holder in foreign_places().items() if name in left}


def _is_wanted(place: Place) -> bool:
    return any(request.wants(place.module) for request in _requests)


def _calls_since(before: dict[str, int]) -> dict[str, int]:
    # A count below its old value: someone called reset_stats() meanwhile.
    since = {name: n - (old if n >= (old := before.get(name, 0)) else 0) for name, n in flashattn_core.stats().items()}
    return {name: n for name, n in since.items() if n}


def _warn(message: str) -> None:
    warnings.warn(message, FlashFallbackWarning, stacklevel=4)
