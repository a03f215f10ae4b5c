"""Put in, take out: through the globals of mlx-lm's modules.

Who wants the patch is a list of requests, one from enable() and one from each open enabled() block, and the modules
of models that were given to patch_model() and are alive. After each change `_settle()` makes the places match, so
that blocks may nest, end out of order and run in several threads. It does so too when a module arrives meanwhile.
All that is changed is changed under one lock.
"""

import importlib
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import get_args
from weakref import WeakValueDictionary

import flashattn_core
from flashattn_core import _ext
from flashattn_core.arguments import Precision
from mlx.nn.layers.base import Module

from . import registry
from .arrivals import Arrivals
from .hand_written import HAND_WRITTEN
from .places import Place, places
from .registry import BASE, PACKAGE, Models
from .route import FlashFallbackWarning, Way, for_every_model, for_patched_models, route


class FlashNeverRanError(RuntimeError):
    """With strict=True: the patch was on, and no flash attention kernel ran."""


@dataclass(eq=False)
class Request:
    """One wish for the patch."""

    modules: frozenset[str] | None  # None: all
    strict: bool
    precision: Precision
    from_enable: bool
    kernels_before: dict[str, int] = field(default_factory=flashattn_core.stats)
    left_before: int = 0

    def never_ran(self) -> bool:
        return not _calls_since(self.kernels_before) and left_calls() <= self.left_before

    def wants(self, place: Place) -> bool:
        return self.modules is None or place.for_all or place.module in self.modules


SERVED = (
    "__mlxlm_flash__"  # an attribute of instance.py's classes: the modules through whose places they call attention
)

lock = threading.RLock()
_requests: list[Request] = []
_patched_modules = WeakValueDictionary[int, Module]()  # by id
_exchanged: dict[tuple[int, str], Place] = {}  # by key: the places that hold something of ours, or did until now
_kernels_before: dict[str, int] = {}  # flashattn_core.stats() when counting began


def enable(models: Models = None, strict: bool = False, precision: Precision = "input") -> None:
    """Routes mlx-lm's attention through flash attention, in this process, until disable().

    Args:
      models: None for every model, also those that are imported later; or a model type such as ``"qwen2"``,
        or a list of them: then only their modules are patched, and imported if need be.
      strict: a call that would fall back to mlx-lm's own attention raises FlashFallbackError, and disable()
        raises FlashNeverRanError if no kernel ran.
      precision: ``"input"``: 16-bit models keep the accuracy that MLX's own attention gives them, and what MLX's own
        fused attention computes faster on this GPU is left to it, which status() counts apart from fallbacks.
        ``"float32"``: every result is that of casting to float32, computing, and casting back; nothing is left.
        On the CPU both give the same bits.

    A second enable() replaces the first: its arguments hold from then on, and the counts go on.
    Places where another library's function sits are left alone, warned about and named by status().

    Raises:
      TypeError, ValueError: `models` has another type, is empty, or names something that cannot be patched;
        `precision` is neither.
      RuntimeError: mlx-lm's function has another signature than the one tested; both are named.
    In each case everything stays as it was.
    """
    request = _request(models, strict, precision, from_enable=True)
    with lock:
        _examine(request)
        previous = [r for r in _requests if r.from_enable]
        if previous:
            request.kernels_before, request.left_before = previous[0].kernels_before, previous[0].left_before
        _admit(request, instead_of=previous)


def disable() -> None:
    """Takes the patch out: mlx-lm's own objects are back in every module, open enabled() blocks end early.

    Only where this package's function still sits: a place that someone else has overwritten meanwhile is left,
    warned about and named by status(). Models given to patch_model() stay patched, and so do, for them alone, the
    places that they use. Without enable() it does nothing.

    Raises FlashNeverRanError, after everything is restored, if strict was asked for and no kernel ran since.
    Arrays are lazy: one that is not evaluated yet has not run.
    """
    _end(list(_requests))


@contextmanager
def enabled(models: Models = None, strict: bool = False, precision: Precision = "input") -> Iterator[None]:
    """The patch for the length of a block; takes and raises what enable() and disable() do.

    Blocks nest, in each other and in enable(): patched is what any of them wants, strict if any of them is, in float32
    if any of them is, and the end of a block takes out only what no other wants.
    """
    request = _request(models, strict, precision, from_enable=False)
    try:  # from here on: an interrupt may come while places are exchanged
        with lock:
            _examine(request)
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


def left_calls() -> int:
    """How many calls were left to MLX's own attention since counting began, because that is faster here."""
    return sum(count for *_, count in _ext.left_calls())


def start_counting() -> None:
    """Calls and fallbacks count from here; each reason to fall back is warned about anew."""
    _kernels_before.clear()
    _kernels_before.update(flashattn_core.stats())
    with route.lock:
        route.fallbacks.clear()
    _ext.reset_left_calls()


def is_on() -> bool:
    return bool(_requests)


def serve(modules: Iterable[Module]) -> None:
    """Attention in the calls of these modules, which have classes of instance.py's, is flash attention."""
    with lock:
        if not _requests and not _patched_modules:
            start_counting()
        _patched_modules.update({id(module): module for module in modules})
        _settle()


def dismiss(modules: Iterable[Module]) -> None:
    with lock:
        for module in modules:
            _patched_modules.pop(id(module), None)
        overwritten = _settle()
    _warn_of(overwritten, "unpatch_model")


def patched_places() -> tuple[str, ...]:
    """The places where every model's attention is flash attention now."""
    return tuple(place.name for place in places() if place.way is for_every_model and not place.for_all)


def foreign_places() -> dict[str, str]:
    """Place → what another library has put there."""
    return {place.name: _described(place.held) for place in places() if _is_foreign(place)}


def _is_foreign(place: Place) -> bool:
    return registry.is_mlx_lm(place.module) and place.original is None


def _described(held: object) -> str:
    return f"{getattr(held, '__module__', '?')}.{getattr(held, '__qualname__', type(held).__qualname__)}"


def _request(models: Models, strict: bool, precision: Precision, from_enable: bool) -> Request:
    """Imports what is asked for: outside of the lock, which modules that arrive in other threads wait for."""
    if precision not in get_args(Precision):
        raise ValueError(f"[enable] precision is {precision!r}, expected 'float32' or 'input'")
    importlib.import_module(BASE)
    return Request(registry.modules_of(models), strict, precision, from_enable)


def _examine(request: Request) -> None:
    """All that can fail, before anything is changed."""
    for what in HAND_WRITTEN:  # also of modules that are yet to come
        if request.modules is None or f"{PACKAGE}.{what.module}" in request.modules:
            what.check()
    wanted = [place for place in places() if request.wants(place)]
    _check_originals(wanted)
    for place in wanted:
        if _is_foreign(place):
            message = f"[enable] {place.name} holds {_described(place.held)}, not mlx-lm's own: left alone"
            warnings.warn(message, FlashFallbackWarning, stacklevel=3)


def _admit(request: Request, instead_of: Collection[Request] = ()) -> None:
    if not _requests:
        start_counting()
    if not instead_of:
        request.left_before = left_calls()
    _requests[:] = [r for r in _requests if r not in instead_of] + [request]
    _settle()


def _end(requests: list[Request]) -> None:
    """Withdraws the requests that are still in force, and then says what is to be said about them."""
    with lock:
        ended = [r for r in requests if r in _requests]
        _requests[:] = [r for r in _requests if r not in ended]
        overwritten = _settle()
    _warn_of(overwritten, "disable")
    if any(r.strict and r.never_ran() for r in ended):
        raise FlashNeverRanError("strict: flash attention never ran while it was enabled")


def _settle() -> dict[str, str]:
    """Makes the places match what is wanted: what the patch puts there, or what was there before.

    Returns the places that should be given back and are someone else's by now.
    """
    route.open = bool(_requests)
    route.strict = any(r.strict for r in _requests)
    route.precision = "float32" if any(r.precision == "float32" for r in _requests) else "input"
    _arrivals.listen(route.open or bool(_patched_modules))
    way_of = _ways()
    # Not all places that hold something of ours need be found again: a module may have been loaded anew meanwhile.
    for place in {place.key: place for place in [*_exchanged.values(), *places()]}.values():
        original, way = place.original, way_of(place)
        if original is None:  # another library's
            continue
        if way is None:
            _exchanged.pop(place.key, None)
        elif place.way is way or _may_be_exchanged(place, original, way):
            _exchanged[place.key] = place
        else:
            continue
        if place.way is not way:
            place.exchange(original, way)
    left = [place for place in _exchanged.values() if way_of(place) is None]
    for place in left:
        del _exchanged[place.key]
    return {place.name: _described(place.held) for place in left if _is_foreign(place)}


def _ways() -> Callable[[Place], Way | None]:
    """For whose calls a place is wanted now; None where nobody wants it."""
    classes = {type(module) for module in _patched_modules.values()}
    served = {name for cls in classes for name in getattr(cls, SERVED)}

    def way_of(place: Place) -> Way | None:
        if any(request.wants(place) for request in _requests) or (place.for_all and served):
            return for_every_model
        return for_patched_models if place.module in served else None

    return way_of


def _may_be_exchanged(place: Place, original: object, way: Way) -> bool:
    """Whether it is mlx-lm's, or what a patched model uses; and not of a version that was refused when it arrived."""
    if not registry.is_mlx_lm(place.module) and way is for_every_model:
        return False
    try:
        place.check(original)
    except RuntimeError:
        return False
    return True


def _arrived(module: ModuleType) -> None:
    """The module has been executed while the patch is on."""
    with lock:
        way_of = _ways()
        _check_originals([place for place in places() if place.module == module.__name__ and way_of(place)])
        _settle()


_arrivals = Arrivals(_arrived)


def _check_originals(wanted: list[Place]) -> None:
    for place in wanted:
        # Modules of others may hold the function of a base that has been reloaded since.
        if registry.is_mlx_lm(place.module) and place.is_original(place.held):
            place.check(place.held)


def _calls_since(before: dict[str, int]) -> dict[str, int]:
    # A count below its old value: someone called reset_stats() meanwhile.
    since = {name: n - (old if n >= (old := before.get(name, 0)) else 0) for name, n in flashattn_core.stats().items()}
    return {name: n for name, n in since.items() if n}


def _warn_of(overwritten: dict[str, str], caller: str) -> None:
    for name, holder in overwritten.items():
        message = f"[{caller}] {name} was overwritten meanwhile by {holder}: left alone"
        warnings.warn(message, FlashFallbackWarning, stacklevel=4)
