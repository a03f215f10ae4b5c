"""Put in, take out, for the whole process: through the globals of mlx-lm's modules.

Who wants the patch is a list of requests, one from enable() and one from each open enabled() block. After each
change of the list `_settle()` makes the modules match it, so that blocks may nest, end out of order and run in
several threads. It does so too when a module arrives meanwhile.
"""

import importlib
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import flashattn_core

from . import registry
from .arrivals import Arrivals
from .hand_written import HAND_WRITTEN
from .places import Place, places
from .registry import BASE, PACKAGE, Models
from .route import FlashFallbackWarning, route


class FlashNeverRanError(RuntimeError):
    """With strict=True: the patch was on, and no flash attention kernel ran."""


@dataclass(eq=False)
class Request:
    """One wish for the patch."""

    modules: frozenset[str] | None  # None: all
    strict: bool
    from_enable: bool
    kernels_before: dict[str, int] = field(default_factory=flashattn_core.stats)

    def wants(self, place: Place) -> bool:
        return self.modules is None or place.for_all or place.module in self.modules


_lock = threading.RLock()
_requests: list[Request] = []
_taken: dict[tuple[int, str], tuple[Place, object]] = {}  # by key: the place, and what was taken out of it
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
    try:  # from here on: an interrupt may come while places are exchanged
        with _lock:
            _admit(request)
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
    """The places whose attention is flash attention now."""
    return tuple(place.name for place in places() if place.held is place.ours and not place.for_all)


def foreign_places() -> dict[str, str]:
    """Place → what another library has put there."""
    return {place.name: _described(place.held) for place in places() if _is_foreign(place)}


def _is_foreign(place: Place) -> bool:
    held = place.held
    return registry.is_mlx_lm(place.module) and held is not place.ours and not place.is_original(held)


def _described(held: object) -> str:
    return f"{getattr(held, '__module__', '?')}.{getattr(held, '__qualname__', type(held).__qualname__)}"


def _request(models: Models, strict: bool, from_enable: bool) -> Request:
    """All that can fail, before anything is changed."""
    importlib.import_module(BASE)
    request = Request(registry.modules_of(models), strict, from_enable)
    for what in HAND_WRITTEN:  # also of modules that are yet to come
        if request.modules is None or f"{PACKAGE}.{what.module}" in request.modules:
            what.check()
    wanted = [place for place in places() if request.wants(place)]
    _check_originals(wanted)
    for place in wanted:
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
    _arrivals.listen(route.open)
    # Not all places that hold something of ours need be found again: a module may have been loaded anew meanwhile.
    for place in {place.key: place for place in [*(place for place, _ in _taken.values()), *places()]}.values():
        held, wanted = place.held, _is_wanted(place)
        if wanted and registry.is_mlx_lm(place.module) and place.is_original(held):
            _taken[place.key] = place, held
            place.put(place.ours)
        elif not wanted and held is place.ours:
            # Imported while patched, if nothing was taken: there never was another object in this place.
            _, original = _taken.pop(place.key, (place, place.original()))
            place.put(original)
    left = [place for place, _ in _taken.values() if not _is_wanted(place)]
    for place in left:
        del _taken[place.key]
    return {place.name: _described(place.held) for place in left if _is_foreign(place)}


def _arrived(module: ModuleType) -> None:
    """The module has been executed while the patch is on: what was taken out of it before is history."""
    with _lock:
        for key in [key for key, (place, _) in _taken.items() if place.owner is module]:
            del _taken[key]
        _check_originals([place for place in places() if _is_wanted(place)])
        _settle()


_arrivals = Arrivals(_arrived)


def _check_originals(wanted: list[Place]) -> None:
    for place in reversed(wanted):  # base last: what it holds is what later imports would get
        # Modules of others may hold the function of a base that has been reloaded since.
        if registry.is_mlx_lm(place.module) and place.is_original(place.held):
            place.check(place.held)


def _is_wanted(place: Place) -> bool:
    return any(request.wants(place) for request in _requests)


def _calls_since(before: dict[str, int]) -> dict[str, int]:
    # A count below its old value: someone called reset_stats() meanwhile.
    since = {name: n - (old if n >= (old := before.get(name, 0)) else 0) for name, n in flashattn_core.stats().items()}
    return {name: n for name, n in since.items() if n}


def _warn(message: str) -> None:
    warnings.warn(message, FlashFallbackWarning, stacklevel=4)
