"""Switches the patch for the process, for a block or for one model, and reports what ran.

enable() and each enabled() block add a Request. The patch is on while a Request or a model given to patch_model()
exists. After each change, `_settle()` replaces or restores the functions. So blocks may nest, end out of order and run
in several threads. One lock guards all changes.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, get_args
from weakref import WeakValueDictionary

import flashattn_core
import mlx.core as mx
from flashattn_core import _ext
from flashattn_core.argument_types import describe
from flashattn_core.arguments import Precision
from mlx.nn.layers.base import Module

from . import patch_points
from .caches import kv_bits as caches
from .patch_points import HOMES, is_ours, lock
from .router import Function, beneath, in_model, in_trial, inside, is_active, observing, state


class FlashNeverRanError(RuntimeError):
    """Raised with strict=True if no call ran as flash attention while the patch was on.

    It is not raised if a call was left to MLX because MLX is estimated to be faster.
    """


class Counts:
    """A snapshot of two counts: each kernel's calls, and the calls that were left to MLX."""

    def __init__(self) -> None:
        self.kernels = flashattn_core.stats()
        self.left = sum(_ext.left_calls().values())

    def calls_since(self) -> dict[str, int]:
        """Maps each kernel to the number of calls that it ran since this object was made."""
        # A count that is lower than before means that somebody has called reset_stats().
        now, before = flashattn_core.stats(), self.kernels
        since = {name: n - (old if n >= (old := before.get(name, 0)) else 0) for name, n in now.items()}
        return {name: n for name, n in since.items() if n}


@dataclass(eq=False)
class Request:
    """One call of enable() or one open enabled() block."""

    strict: bool
    precision: Precision
    kv: caches.KVBits | None
    from_enable: bool
    before: Counts = field(init=False)  # the counts when the request began

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"[enable] precision is {self.precision!r}, expected 'float32' or 'input'")

    def never_ran(self) -> bool:
        return not self.before.calls_since() and Counts().left <= self.before.left


_requests: list[Request] = []
_patched_models = WeakValueDictionary[int, Module]()  # by id: models given to patch_model()
_patched_modules = WeakValueDictionary[int, Module]()  # by id: the modules of these models and of their copies
_patched_classes = WeakValueDictionary[type, type]()  # class -> its subclass that _patched() made
_began = Counts()


def enable(
    *,
    strict: bool = False,
    precision: Precision = "input",
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
) -> None:
    """Replaces ``mx.fast.scaled_dot_product_attention`` in this process with flash attention, until disable().

    Also replaces mlx-lm's attention over quantised caches and in gemma2, phi3small and gear.

    Args:
      strict: a call that flash attention cannot compute raises FlashFallbackError. disable() raises FlashNeverRanError
        if no call ran as flash attention and none was left to MLX because MLX is estimated to be faster.
      precision: with ``"input"``, 16-bit results are as accurate as those of MLX's own attention. A call goes to MLX if
        MLX's own fused attention is estimated to be faster for it on this GPU. status() does not count such calls as
        fallbacks.
        With ``"float32"``, every result of flash attention is that of casting to float32, computing, and casting
        back. No call is left to MLX for speed. On the CPU, both values give the same bits.
      kv_bits: 8 or 4: mlx-lm's ``make_prompt_cache()`` makes caches that store keys and values quantised to so many
        bits, also rotating ones, and the batches that mlx-lm merges them into. A warning names layers whose caches stay
        as they are. None: caches are mlx-lm's own.
      kv_group_size: how many elements of a key or value share a scale and a bias: 32, 64 or 128.
      quantized_kv_start: a cache is quantised once it holds so many tokens, and holds 16 bits until then.

    A second enable() replaces the arguments of the first, and resets no count.
    enable() does not replace other libraries' functions, nor functions of mlx-lm that this version was not tested with.
    It warns of both.
    A function that mx.compile has already traced keeps the attention that it was traced with.

    Raises ValueError for a bad argument, and RuntimeError for `kv_bits` if the caches of this release of mlx-lm were
    not tested, or if another library has replaced ``make_prompt_cache()``. Then nothing changes.
    """
    request = Request(strict, precision, _kv(kv_bits, kv_group_size, quantized_kv_start), from_enable=True)
    try:
        _begin(request)
    except BaseException:  # for example a warning that the program turns into an error
        request.strict = False  # so that FlashNeverRanError does not hide this exception
        _end([request])
        raise


def disable() -> None:
    """Switches the patch off: restores MLX's and mlx-lm's own functions, and ends open enabled() blocks early.

    Does nothing unless enable() or an enabled() block is in force.
    Models given to patch_model() stay patched. Another library's function stays. If it has saved the patch's function,
    that function then calls the original one.

    Raises FlashNeverRanError, after restoring everything, if strict was on but no call ran as flash attention and
    none was left to MLX because MLX is estimated to be faster. A call counts as run when MLX has evaluated its result.
    """
    _end(list(_requests))


@contextmanager
def enabled(
    *,
    strict: bool = False,
    precision: Precision = "input",
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
) -> Iterator[None]:
    """Turns the patch on for a block. Takes the arguments of enable(). Raises the errors of enable() and disable().

    Blocks may nest, also after enable(). The patch stays on until all of them have ended. It is strict if one of them
    is strict, and computes in float32 if one of them asks for float32. New caches get the `kv_bits` of the last one
    that has any. They keep them after the block.
    """
    request = Request(strict, precision, _kv(kv_bits, kv_group_size, quantized_kv_start), from_enable=False)
    try:  # includes _begin(), because Ctrl-C may come while _begin() replaces functions
        _begin(request)
        yield
    except BaseException:
        request.strict = False  # so that FlashNeverRanError does not hide this exception
        raise
    finally:
        _end([request])


def patch_model(model: Module) -> None:
    """Turns flash attention on for this one model, until unpatch_model().

    It replaces the attention that runs within a call of the model or of one of its modules. Other models of the same
    class are not affected. The model's parameters, state and children stay the same. Copies and pickles of the model
    are patched, too. It works with or without enable(). A second call for the same model changes nothing.

    Raises TypeError if `model` is not an mlx.nn.Module.
    """
    modules = _modules("patch_model", model)
    _wait_for_imports()
    with lock:
        # Modules without submodules compute no attention. Patching only the whole model is not enough, because
        # mx.checkpoint calls a layer again after the model's call.
        modules = [module for module in modules if module.children() and callable(module)]  # type: ignore[no-untyped-call]
        modules = [module for module in modules if not _is_patched(type(module))]
        classes = [_patched(type(module)) for module in modules]  # raises if a class cannot be subclassed
        for module, cls in zip(modules, classes, strict=True):
            object.__setattr__(module, "__class__", cls)
        _patched_models[id(model)] = model
        left = _serve(modules)
    try:
        patch_points.warn_of(left)
    except BaseException:  # the program turns warnings into errors
        unpatch_model(model)
        raise


def unpatch_model(model: Module) -> None:
    """Undoes patch_model(): the model's modules get their own classes back. Does nothing to an unpatched model.

    Raises TypeError if `model` is not an mlx.nn.Module.
    """
    with lock:
        for module in _modules("unpatch_model", model):
            if _is_patched(type(module)):
                object.__setattr__(module, "__class__", type(module).__bases__[0])
                _patched_modules.pop(id(module), None)
        _patched_models.pop(id(model), None)
        _settle()


@contextmanager
def observe(observer: Callable[..., mx.array]) -> Iterator[None]:
    """Inside the block, every attention call goes through `observer`, with the patch on or off.

    `observer` gets the function that computes attention, and then the call's arguments. The function is MLX's or
    mlx-lm's own, or the patch's. If it is a method, the first argument is `self`. Query, key and value, `(B, H, L, D)`
    or quantised, come next. `observer` must return the function's result, `(B, H_q, L_q, D_v)`. `observer` gets
    no calls of Gemma 2, where one function computes attention and projections. Do not switch the patch on or off inside
    the block.

        def counted(attention, *arguments, **others):
            calls.append(attention)
            return attention(*arguments, **others)

        with flash.observe(counted):
            model(tokens)
    """
    held = [point.current for point in patch_points.ATTENTION]
    block = object()
    pairs = [(attention, _observed(attention, observer, block)) for attention in held if attention is not None]
    try:
        observing.update((after, before) for before, after in pairs)
        patch_points.exchange(pairs)
        yield
    finally:
        patch_points.exchange([(after, before) for before, after in pairs])
        for _, after in pairs:
            observing.pop(after, None)


@dataclass(frozen=True)
class Status:
    """The state of the patch, which `str()` formats for people. Counts begin when the patch is switched on.

    Attributes:
      enabled: whether enable() or an enabled() block is in force.
      strict: whether one of them is strict.
      patched: the functions of MLX and mlx-lm that the patch replaces now.
      instances: how many models given to patch_model() are alive.
      calls: kernel → calls that ran (were evaluated).
      fallbacks: reason → calls that flash attention could not compute.
      left: reason → calls left to MLX's own attention, because it is estimated to be faster than our kernel.
      foreign: function → another library's function that replaces it, or that wraps the patch's function.
      versions: distribution → its version.
    """

    enabled: bool
    strict: bool
    patched: tuple[str, ...]
    instances: int
    calls: Mapping[str, int]
    fallbacks: Mapping[str, int]
    left: Mapping[str, int]
    foreign: Mapping[str, str]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        how = f"{'on' if self.enabled else 'off'}{', strict' if self.strict else ''}"
        first = f"flash attention {how} · functions replaced: {len(self.patched)} · models patched: {self.instances}"
        return "\n".join((first, f"calls: {self.counts()}", *self.replaced(), joined(self.versions)))

    def replaced(self) -> list[str]:
        """A text for each function in `foreign`."""
        return [f"another library has replaced {name} with {holder}" for name, holder in self.foreign.items()]

    def counts(self) -> str:
        """A text with the numbers of calls that ran, fell back, or were left to MLX."""
        ran = f"{tally(self.calls)} · fallbacks: {tally(self.fallbacks)}"
        return f"{ran} · left to MLX's own attention: {tally(self.left)}" if self.left else ran

    def nothing_ran(self) -> bool:
        """True if no call ran as flash attention and none was left to MLX because MLX is estimated to be faster."""
        return not self.calls and not self.left


def status() -> Status:
    """Returns a :class:`Status`: what is patched now, and which calls ran since the patch was last switched on."""
    installed = versions()
    with lock, state.lock:
        if not _requests and not _patched_modules:  # a patched model may have been deleted
            _settle()
        return Status(
            enabled=bool(_requests),
            strict=state.strict,
            patched=tuple(point.name for point in patch_points.wanted() if is_ours(beneath(point.current))),
            instances=len(_patched_models),
            calls=_began.calls_since(),
            fallbacks=dict(state.fallbacks),
            left={_why_left(kernel): calls for kernel, calls in _ext.left_calls().items()},
            foreign=patch_points.foreign(),
            versions=installed,
        )


def _why_left(kernel: str) -> str:
    cost, source = _ext.cost_of(getattr(_ext.Kernel, kernel), _ext.device_of(mx.Device(mx.gpu)))
    return f"{kernel} is estimated at {cost:.3g} times MLX's time per pair ({source})"


def versions() -> dict[str, str]:
    """Installed distribution -> version."""
    found = {}
    for name in ("mlx", "mlx-lm", "flashattn-core", "mlxlm-flash-patch"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def tally(counts: Mapping[str, int]) -> str:
    """Formats counts, for example as ``cpu_decode 480, cpu_prefill 24``. Without counts, returns ``none``."""
    return ", ".join(f"{name} {n:,}" for name, n in counts.items()) or "none"


def joined(named: Mapping[str, str]) -> str:
    """Formats names and values, for example as ``mlx 0.32.4 · mlx-lm 0.32.2``."""
    return " · ".join(f"{name} {value}" for name, value in named.items())


def _wait_for_imports() -> None:
    """Waits for imports of modules in HOMES that other threads have begun.

    `_finder` misses imports begun before watch_imports(). After the wait, put_in() replaces the modules' functions.
    """
    if not isinstance(mx.fast, ModuleType):  # here, because nothing has changed yet
        raise TypeError(f"mx.fast is {describe(mx.fast)}, expected MLX's module")
    with lock:
        patch_points.watch_imports()
    for name in HOMES & sys.modules.keys():
        with suppress(ImportError):  # that import has failed
            importlib.import_module(name)


def _kv(bits: int | None, group_size: int, start: int) -> caches.KVBits | None:
    if bits is None:
        return None
    kv = caches.KVBits(bits, group_size, start)
    from .caches.release import require_tested  # imported here, because it imports mlx-lm

    require_tested()
    point = patch_points.MAKE_CACHES
    if why := point.why_not(patch_points.original_of(point.current)):
        raise RuntimeError(f"[enable] kv_bits cannot replace {point.name}: {why}")
    importlib.import_module(".caches.quantized", __package__)  # adds the classes that load_prompt_cache() looks up
    return kv


def _begin(request: Request) -> None:
    """Adds a request. One from enable() replaces that of an earlier enable(). Warns of functions that stay."""
    _wait_for_imports()
    with lock:
        _count_if_off()
        previous = [r for r in _requests if r.from_enable and request.from_enable]
        request.before = previous[0].before if previous else Counts()
        _requests[:] = [r for r in _requests if r not in previous] + [request]
        left = _settle()
    patch_points.warn_of(left)


def _end(requests: list[Request]) -> None:
    """Removes those of `requests` that are in `_requests`. Raises FlashNeverRanError for one that is strict."""
    with lock:
        ended = [r for r in requests if r in _requests]
        never_ran = any(r.strict and r.never_ran() for r in ended)  # now, because a later request may reset the counts
        _requests[:] = [r for r in _requests if r not in ended]
        _settle()
    if never_ran:
        now = status()
        none = f"no call of {patch_points.MX_ATTENTION.name} was evaluated"
        compiled = "functions that mx.compile traced earlier keep MLX's own attention"
        why = "; ".join(now.replaced() or (none, compiled))
        if now.fallbacks:
            why = f"every call fell back: {tally(now.fallbacks)}"
        raise FlashNeverRanError(f"strict: flash attention never ran while the patch was on: {why}")


def _settle() -> dict[str, str]:
    """Replaces the functions if there is a request or a patched model, and restores them otherwise.

    Returns the names of functions that are not replaced, with the reasons.
    """
    state.on, state.strict = bool(_requests), any(r.strict for r in _requests)
    state.precision = "float32" if any(r.precision == "float32" for r in _requests) else "input"
    caches.wanted = next((r.kv for r in reversed(_requests) if r.kv), None)
    if _requests or _patched_modules:
        return patch_points.put_in()
    patch_points.take_out()
    return {}


def _count_if_off() -> None:
    """If the patch is off, resets all counts. After that the first fallback for each reason warns again."""
    global _began
    if not _requests and not _patched_modules:
        with state.lock:
            state.fallbacks.clear()
        _ext.reset_left_calls()
        _began = Counts()


def _modules(caller: str, model: object) -> list[Module]:
    if not isinstance(model, Module):
        raise TypeError(f"[{caller}] model is {describe(model)}, expected an mlx.nn.Module")
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    return modules


def _is_patched(cls: type) -> bool:
    return any(_patched_classes.get(base) is cls for base in cls.__bases__)


def _serve(modules: list[Module]) -> dict[str, str]:
    _count_if_off()
    _patched_modules.update({id(module): module for module in modules})
    return _settle()


def _patched(cls: Any) -> Any:
    """A subclass of `cls` that turns flash attention on during its calls."""
    if cls in _patched_classes:
        return _patched_classes[cls]

    class PatchedModel(cls):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            if is_active():
                return super().__call__(*arguments, **options)
            if id(self) not in _patched_modules:  # a copy of a patched module
                with lock:
                    left = _serve([self])
                patch_points.warn_of(left)
            with inside(in_model):
                return super().__call__(*arguments, **options)

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            # PatchedModel has the name of `cls`. pickle looks classes up by name, so it would find `cls` instead.
            make, (of, *arguments), *state = super().__reduce_ex__(protocol)
            return _rebuild, (make, cls if of is PatchedModel else of, *arguments), *state

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(PatchedModel, name, getattr(cls, name))
    return _patched_classes.setdefault(cls, PatchedModel)


def _rebuild(make: Callable[..., Module], cls: type, *arguments: Any) -> Module:
    with lock:
        return make(_patched(cls), *arguments)


# The observe() blocks whose observers have the call.
_observed_by = ContextVar[frozenset[object]]("mlxlm_flash_patch: observe() blocks", default=frozenset())


def _observed(attention: Function, observer: Function, block: object) -> Function:
    """Wraps `attention` for `observer`. If one wrapped function calls another, `observer` gets only the outer call."""

    @wraps(attention)
    def observed(*arguments: Any, **others: Any) -> mx.array:
        if block in (blocks := _observed_by.get()) or in_trial.get():
            return attention(*arguments, **others)
        with inside(_observed_by, blocks | {block}):
            return observer(attention, *arguments, **others)

    return observed
