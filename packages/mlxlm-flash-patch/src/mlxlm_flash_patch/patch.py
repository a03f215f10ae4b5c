"""Switching the patch: for the process, for a block, for one model; and what it did.

Who wants the patch is a list of requests, one from enable() and one from each open enabled() block, and the models that
were given to patch_model() and are alive. After each change `_settle()` makes the functions match, so that blocks may
nest, end out of order and run in several threads. All that is changed is changed under one lock.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args
from weakref import WeakValueDictionary

import flashattn_core
import mlx.core as mx
from flashattn_core import _ext
from flashattn_core.argument_types import describe
from flashattn_core.arguments import Precision
from mlx.nn.layers.base import Module

from . import patch_points
from .patch_points import HOMES, POINTS, is_ours, lock
from .router import active, is_active, state

DISTRIBUTIONS = ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch")
NEVER_CALLED = "no call of mx.fast.scaled_dot_product_attention was evaluated"


class FlashNeverRanError(RuntimeError):
    """With strict=True: the patch was on, and no flash attention kernel ran."""


def _left_calls() -> int:
    return sum(count for *_, count in _ext.left_calls())


@dataclass(frozen=True)
class Counts:
    """The calls up to a moment, which is when this is made."""

    kernels: Mapping[str, int] = field(default_factory=flashattn_core.stats)
    left: int = field(default_factory=_left_calls)

    def calls_since(self) -> dict[str, int]:
        # A count below its old value: someone called reset_stats() meanwhile.
        now, before = flashattn_core.stats(), self.kernels
        since = {name: n - (old if n >= (old := before.get(name, 0)) else 0) for name, n in now.items()}
        return {name: n for name, n in since.items() if n}


@dataclass(eq=False)
class Request:
    """One wish for the patch."""

    strict: bool
    precision: Precision
    from_enable: bool
    before: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"[enable] precision is {self.precision!r}, expected 'float32' or 'input'")

    def never_ran(self) -> bool:
        return not self.before.calls_since() and _left_calls() <= self.before.left


_requests: list[Request] = []
_patched_models = WeakValueDictionary[int, Module]()  # by id: what was given to patch_model()
_patched_modules = WeakValueDictionary[int, Module]()  # by id: the modules of these models, and of copies
_patched_classes = WeakValueDictionary[type, type]()  # by the class that it is derived from
_began = Counts()


def enable(*, strict: bool = False, precision: Precision = "input") -> None:
    """Replaces ``mx.fast.scaled_dot_product_attention`` in this process with flash attention, until disable().

    Also replaces mlx-lm's attention over quantised caches and in gemma2, phi3small and gear.

    Args:
      strict: a call that cannot be flash attention raises FlashFallbackError, and disable() raises FlashNeverRanError
        if no kernel ran.
      precision: ``"input"``: 16-bit models keep the accuracy that MLX's own attention gives them, and what MLX's own
        fused attention computes faster on this GPU is left to it, which status() counts apart from fallbacks.
        ``"float32"``: every result is that of casting to float32, computing, and casting back; nothing is left.
        On the CPU both give the same bits.

    A second enable() replaces the first: its arguments hold from then on, and the counts go on.
    A function of mlx-lm that is not one that this version was tested with is left as it is, with a warning.
    A function that mx.compile has traced before keeps the attention that it was traced with.

    Raises ValueError if `precision` is neither; then everything stays as it was.
    """
    request = Request(strict, precision, from_enable=True)
    _wait_for_imports()
    with lock:
        previous = [r for r in _requests if r.from_enable]
        if previous:
            request.before = previous[0].before
        left = _admit(request, instead_of=previous)
    try:
        patch_points.warn_of(left)
    except BaseException:  # warnings are errors here
        request.strict = False  # the exception says more than that flash never ran
        _end([request])
        raise


def disable() -> None:
    """Takes the patch out: MLX's and mlx-lm's own functions are back, open enabled() blocks end early.

    Where another library has put its own function around ours, that stays, and ours passes calls on; status() names it.
    Models given to patch_model() stay patched. Without enable() it does nothing.

    Raises FlashNeverRanError, after everything is restored, if strict was asked for and no kernel ran since.
    Arrays are lazy: one that is not evaluated yet has not run.
    """
    _end(list(_requests))


@contextmanager
def enabled(*, strict: bool = False, precision: Precision = "input") -> Iterator[None]:
    """The patch for the length of a block; takes and raises what enable() and disable() do.

    Blocks nest, in each other and in enable(): the patch is in as long as any of them wants it, strict if any of them
    is, and in float32 if any of them is.
    """
    request = Request(strict, precision, from_enable=False)
    _wait_for_imports()
    try:  # from here on: an interrupt may come while functions are exchanged
        with lock:
            left = _admit(request)
        patch_points.warn_of(left)
        yield
    except BaseException:
        request.strict = False  # the exception says more than that flash never ran
        raise
    finally:
        _end([request])


def patch_model(model: Module) -> None:
    """Makes flash attention of the attention of this one model, until unpatch_model().

    Attention is the model's if it is called within a call of the model or of one of its modules. Other models of the
    same class are not affected, nor are this one's parameters, state and children; copies and pickles of it are patched
    as well. It holds whether or not enable() is in force. Twice is once.

    Raises TypeError if `model` is no mlx.nn.Module.
    """
    _require_module("patch_model", model)
    _wait_for_imports()
    with lock:
        modules = [module for module in _modules(model) if _can_attend(module)]
        classes = [_patched(type(module)) for module in modules]  # any of which may refuse to be derived from
        for module, cls in zip(modules, classes, strict=True):
            object.__setattr__(module, "__class__", cls)
        _patched_models[id(model)] = model
        left = _serve(modules)
    try:
        patch_points.warn_of(left)
    except BaseException:  # warnings are errors here
        unpatch_model(model)
        raise


def unpatch_model(model: Module) -> None:
    """Gives the modules of a model their own classes back. Does nothing to a model that is not patched.

    Raises TypeError if `model` is no mlx.nn.Module.
    """
    _require_module("unpatch_model", model)
    with lock:
        for module in _modules(model):
            if _is_patched(type(module)):
                object.__setattr__(module, "__class__", type(module).__bases__[0])
                _patched_modules.pop(id(module), None)
        _patched_models.pop(id(model), None)
        _settle()


@contextmanager
def observe(observer: Callable[..., mx.array]) -> Iterator[None]:
    """In the block each call of attention goes through `observer`, whoever computes it.

    It gets the function that computes attention, which is MLX's or mlx-lm's own or what the patch has put there, and
    the call's arguments as they came: query, key and value, `(B, H, L, D)` or quantised, are among the first four,
    behind a `self` where there is one. It returns what the function gives for them, `(B, H_q, L_q, D_v)`. Attention
    that is written out in one with its projections (Gemma 2) is not seen. In the block the patch must not be switched.

        def counted(attention, *arguments, **others):
            calls.append(attention)
            return attention(*arguments, **others)

        with flash.observe(counted):
            model(tokens)
    """
    with lock:
        held = [(point, point.current) for point in POINTS if point.is_attention and point.current is not None]
    swapped = [(point, before, _observed(before, observer)) for point, before in held]
    try:
        _swap(swapped)
        yield
    finally:
        _swap([(point, after, before) for point, before, after in swapped])


@dataclass(frozen=True)
class Left:
    """Calls of one kind that were left to MLX's own attention, and what a call takes here, in seconds."""

    calls: int
    mlx_seconds: float
    flash_seconds: float

    def __str__(self) -> str:
        mlx, flash = 1e3 * self.mlx_seconds, 1e3 * self.flash_seconds
        return f"{count(self.calls, 'call')} (MLX {mlx:.3g} ms, flash attention {flash:.3g} ms)"


@dataclass(frozen=True)
class Status:
    """The state of the patch; `str()` of it is for reading.

    Attributes:
      enabled: whether enable() or an enabled() block is in force.
      strict: whether one of them asked for that.
      patched: the functions of MLX and mlx-lm in whose place the patch's are now.
      instances: how many models given to patch_model() are alive.
      calls: kernel → calls that really ran, since the patch was last switched on.
      fallbacks: reason → calls that were not flash attention, since then.
      left: kind of call, in words → calls that were left to MLX's own attention, which is faster here, since then.
      foreign: function → whose function stands there in place of it, or around the patch's.
      versions: distribution → its version.
    """

    enabled: bool
    strict: bool
    patched: tuple[str, ...]
    instances: int
    calls: Mapping[str, int]
    fallbacks: Mapping[str, int]
    left: Mapping[str, Left]
    foreign: Mapping[str, str]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        if self.instances and not self.enabled:
            models, replaced = count(self.instances, "model"), count(len(self.patched), "function")
            first = f"flash attention: off for the process, on for {models} · {replaced} replaced"
        else:
            how = f"{'on' if self.enabled else 'off'}{', strict' if self.strict else ''}"
            where = f"{count(len(self.patched), 'function')}, {count(self.instances, 'model instance')}"
            first = f"flash attention {how}: {where}"
        lines = [
            first,
            f"calls: {self.counts()}",
            *(f"another library has replaced {name} with {holder}" for name, holder in self.foreign.items()),
            joined(self.versions),
        ]
        return "\n".join(lines)

    def counts(self) -> str:
        """What ran, and what did not, in words."""
        ran = f"{tally(self.calls)} · fallbacks: {tally(self.fallbacks)}"
        left = "; ".join(map(str, sorted(self.left.values(), key=lambda each: -each.calls)))
        return f"{ran} · left to MLX's own attention: {left}" if left else ran

    def nothing_ran(self) -> bool:
        """Whether no call was flash attention, nor left to MLX because that is faster."""
        return not self.calls and not self.left


def status() -> Status:
    """What is patched now, and what was called since the patch was last switched on: a :class:`Status`."""
    installed = versions()
    with lock:
        if not _requests and not _patched_modules:  # a patched model may be gone since
            _settle()
    with lock, state.lock:
        return Status(
            enabled=bool(_requests),
            strict=state.strict,
            patched=tuple(point.name for point in POINTS if is_ours(point.current)),
            instances=len(_patched_models),
            calls=_began.calls_since(),
            fallbacks=dict(state.fallbacks),
            left={words: Left(calls, mlx, flash) for words, mlx, flash, calls in _ext.left_calls()},
            foreign=patch_points.foreign(),
            versions=installed,
        )


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def tally(counts: Mapping[str, int]) -> str:
    """``cpu_prefill 24, cpu_decode 480``, or ``none``."""
    return ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "none"


def joined(named: Mapping[str, str]) -> str:
    """``mlx 0.32.4 · mlx-lm 0.32.2``."""
    return " · ".join(f"{name} {value}" for name, value in named.items())


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _wait_for_imports() -> None:
    """Another thread may be importing one of the modules, and may have begun before imports were watched."""
    with lock:
        patch_points.watch_imports()
    for name in HOMES & sys.modules.keys():
        with contextlib.suppress(ImportError):  # it has failed meanwhile
            importlib.import_module(name)


def _admit(request: Request, instead_of: Collection[Request] = ()) -> dict[str, str]:
    if not _requests and not _patched_modules:
        _start_counting()
    if not instead_of:
        request.before = Counts()
    _requests[:] = [r for r in _requests if r not in instead_of] + [request]
    return _settle()


def _end(requests: list[Request]) -> None:
    """Withdraws the requests that are still in force, and then says what is to be said about them."""
    with lock:
        ended = [r for r in requests if r in _requests]
        _requests[:] = [r for r in _requests if r not in ended]
        _settle()
    if any(r.strict and r.never_ran() for r in ended):
        fallbacks = status().fallbacks
        compiled = "functions that mx.compile traced earlier keep MLX's own attention"
        why = f"every call fell back: {tally(fallbacks)}" if fallbacks else f"{NEVER_CALLED}; {compiled}"
        raise FlashNeverRanError(f"strict: flash attention never ran while the patch was on: {why}")


def _settle() -> dict[str, str]:
    """Makes the functions match what is wanted. Returns those that are left as they are, with the reason."""
    precision: Precision = "float32" if any(r.precision == "float32" for r in _requests) else "input"
    state.settle(bool(_requests), any(r.strict for r in _requests), precision)
    if _requests or _patched_modules:
        return patch_points.put_in()
    patch_points.take_out()
    return {}


def _start_counting() -> None:
    """Calls and fallbacks count from here; each reason to fall back is warned about anew."""
    global _began
    with state.lock:
        state.fallbacks.clear()
    _ext.reset_left_calls()
    _began = Counts()


def _require_module(caller: str, model: object) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"[{caller}] model is {describe(model)}, expected an mlx.nn.Module")


def _modules(model: Module) -> list[Module]:
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    return modules


def _can_attend(module: Module) -> bool:
    """Those without modules of their own, which are most, only project, normalise or rotate.

    All others are marked, not the model alone: mx.checkpoint computes a layer again outside of the model's call.
    """
    cls = type(module)
    has_call = any("__call__" in vars(base) for base in cls.__mro__)
    return has_call and not _is_patched(cls) and bool(module.children())  # type: ignore[no-untyped-call]


def _is_patched(cls: type) -> bool:
    return any(_patched_classes.get(base) is cls for base in cls.__bases__)


def _serve(modules: list[Module]) -> dict[str, str]:
    if not _requests and not _patched_modules:
        _start_counting()
    _patched_modules.update({id(module): module for module in modules})
    return _settle()


def _patched(cls: Any) -> Any:
    """A subclass in whose calls attention is flash attention."""
    if cls in _patched_classes:
        return _patched_classes[cls]

    class PatchedModel(cls):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            if is_active():
                return super().__call__(*arguments, **options)
            if id(self) not in _patched_modules:  # a copy
                with lock:
                    _serve([self])
            with active(True):
                return super().__call__(*arguments, **options)

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            # pickle finds classes by name, which leads to the class that this one is derived from.
            make, (of, *arguments), *state = super().__reduce_ex__(protocol)
            return _rebuild, (make, cls if of is PatchedModel else of, *arguments), *state

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(PatchedModel, name, getattr(cls, name))
    return _patched_classes.setdefault(cls, PatchedModel)


def _rebuild(make: Callable[..., Module], cls: type, *arguments: Any) -> Module:
    with lock:
        return make(_patched(cls), *arguments)


_is_observed: ContextVar[bool] = ContextVar("mlxlm_flash_patch: within an observed call", default=False)


def _observed(attention: Callable[..., mx.array], observer: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's function calls MLX's: only the outer one of two is shown."""

    @wraps(attention)
    def observed(*arguments: Any, **others: Any) -> mx.array:
        if _is_observed.get():
            return attention(*arguments, **others)
        token = _is_observed.set(True)
        try:
            return observer(attention, *arguments, **others)
        finally:
            _is_observed.reset(token)

    return observed


def _swap(swapped: list[tuple[patch_points.PatchPoint, Any, Any]]) -> None:
    with lock:
        for point, before, after in swapped:
            if point.current is before:
                point.put(after)
        patch_points.exchange([(before, after) for _, before, after in swapped])
