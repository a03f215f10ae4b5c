"""Lists the functions that the patch replaces, and replaces them, also in every module that imported them.

`put_in()` and `take_out()` may be called at any time and repeatedly, because they look up the current functions. A
function of another library stays, whether it was there before the patch or came later. If it wraps the patch's
function, and the patch is off, the patch's function inside the wrapper calls the original function.
"""

import gc
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from . import described_masks, mlx_lm_functions, mlx_own, mx_fast
from .caches import kv_bits
from .mlx_own import is_mlx_attention, mlx_attention
from .router import MLX_LM_BASE, beneath, state, warn

_original_of: dict[Any, Any] = {}  # the patch's function -> the function that it replaces
_methods = WeakKeyDictionary[type, str]()  # class -> its method at a patch point; also classes from before a reload


@dataclass(frozen=True, eq=False)
class PatchPoint:
    """A function or a method that the patch replaces, with its replacement."""

    module: str
    path: str  # of the function in its module, such as `Attention.__call__`
    replacement: Callable[[Any], Any]  # original -> the function that replaces it
    texts: frozenset[str] = frozenset()  # fingerprints of tested sources; if empty, the signature is compared instead

    @property
    def name(self) -> str:
        return f"{self.module}.{self.path}".replace("mlx.core.", "mx.")

    @property
    def owner(self) -> Any:
        """The module or class with the function; None if the module is not imported or lacks the function."""
        owner: Any = sys.modules.get(self.module)
        for name in self.path.split(".")[:-1]:
            owner = names_in(owner).get(name)
        if isinstance(owner, type):  # another library's subclass may inherit the method
            owner = next((cls for cls in owner.__mro__ if self.attribute in vars(cls)), owner)
        return owner if self.attribute in names_in(owner) else None

    @property
    def attribute(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def current(self) -> Any:
        """The function at this point now, or None."""
        owner = self.owner
        return None if owner is None else vars(owner)[self.attribute]

    def ours(self, original: Any) -> Any:
        """Returns the replacement of `original`, the same one each time."""
        made = next((made for made, replaced in _original_of.items() if replaced is original), None)
        if made is None:
            made = self.replacement(original)
            _original_of[made] = original
        return made

    def why_not(self, original: Any) -> str | None:
        """The reason why the patch must not replace this function; None if it may."""
        if is_foreign(self, original):
            return f"another library's function, {_described(original)}, is in its place"
        if self is MX_ATTENTION:
            return None
        if not self.texts:
            if original in _original_of.values():  # compared when the replacement was made
                return None
            known = _signature(original) == _signature(self.replacement(original), follow_wrapped=False)
            return None if known else "its signature is not that of a tested release"
        text = fingerprint(original.__code__) if original else None  # getsource(original) would follow __wrapped__
        if text is None:
            return "its source is not available"
        return None if text in self.texts else "its source is not that of a tested release"


def names_in(owner: Any) -> Mapping[str, Any]:
    """The attributes of a module, a class or any other object in sys.modules.

    vars() would call the module's `__getattribute__`, and so load a module that importlib.util.LazyLoader has deferred.
    """
    try:
        names = object.__getattribute__(owner, "__dict__")
    except Exception:  # an object in sys.modules may have a `__dict__` of its own making
        return {}
    return names if isinstance(names, (dict, Mapping)) else {}  # for a dict, the check is then quick


def is_ours(function: Any) -> bool:
    return type(function) is FunctionType and function in _original_of  # wrapt's wrappers pretend to be what they wrap


def original_of(function: Any) -> Any:
    """If `function` is the patch's, returns the function that it replaces. Otherwise returns `function`."""
    return _original_of[function] if is_ours(function) else function


@lru_cache(maxsize=64)  # because reading the text takes longer than all else that a block of enabled() does
def fingerprint(code: CodeType) -> str | None:
    """A hash of a function's source text, because bytecode differs between versions of Python. None without source."""
    try:
        return hashlib.sha256(inspect.getsource(code).strip().encode()).hexdigest()[:16]
    except OSError:
        return None


def _signature(function: Any, follow_wrapped: bool = True) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters. It leaves out annotations, which do not matter to callers."""
    parameters = inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


OWN_MODULES = (mlx_own.__name__, __name__)  # these keep MLX's own function
BASE, CACHE = MLX_LM_BASE, "mlx_lm.models.cache"
MX_ATTENTION = PatchPoint("mlx.core.fast", "scaled_dot_product_attention", mx_fast.flash_instead_of)


def _mask(module: str, path: str, describe: described_masks.Describe, text: str) -> PatchPoint:
    describing = partial(described_masks.describing, describe=describe)
    return PatchPoint(module, path, describing, frozenset({text}))


# Except for one, the sources of these functions are the same in mlx-lm 0.31.3 to 0.32.2.
ATTENTION: Sequence[PatchPoint] = (  # observe() passes the calls of these to the observer
    MX_ATTENTION,
    PatchPoint(BASE, "quantized_scaled_dot_product_attention", mlx_lm_functions.quantised),
    PatchPoint(BASE, "scaled_dot_product_attention", mlx_lm_functions.any_cache, frozenset({"a13838be6e6c5293"})),
    PatchPoint("mlx_lm.models.gear", "_softcap_attention", mlx_lm_functions.gear, frozenset({"6e8aacdedc907ca0"})),
    PatchPoint(
        "mlx_lm.models.phi3small",
        "Attention._block_sparse_attention",
        mlx_lm_functions.phi3small,
        frozenset({"80c13efe91a00897"}),
    ),
)
POINTS: Sequence[PatchPoint] = (
    *ATTENTION,
    PatchPoint("mlx_lm.models.gemma2", "Attention.__call__", mlx_lm_functions.gemma2, frozenset({"2d6752739f0e58e5"})),
    PatchPoint(
        CACHE,
        "QuantizedKVCache.update_and_fetch",
        mlx_lm_functions.appending,
        frozenset({"7303f170e9cb80e8", "1a03852f80c5fba2"}),  # of mlx-lm 0.31.3, and of 0.32.0 to 0.32.2
    ),
    _mask(BASE, "create_causal_mask", described_masks.causal, "f5ab1820ef1f5d7a"),
    _mask(CACHE, "RotatingKVCache.make_mask", described_masks.rotating, "2fc5a1c461dc4891"),
    _mask(CACHE, "BatchRotatingKVCache.make_mask", described_masks.batch_rotating, "3ca9935c750004fb"),
)

# This is replaced only while `kv_bits` asks for quantised caches.
MAKE_CACHES = PatchPoint(CACHE, "make_prompt_cache", mlx_lm_functions.quantised_caches, frozenset({"7cde4e9fdb0c1b5a"}))


lock = threading.RLock()
_in_force = False
_left_alone: dict[int, Any] = {}  # by id: functions that put_in() has rejected
# (module, name): the functions of patch points that are no methods, and where exchange() has found others
_places = {(point.module, point.path) for point in (*POINTS, MAKE_CACHES)}


def watch_imports() -> None:
    """Installs `_finder`, which replaces the functions of modules in HOMES that are imported while the patch is on."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def wanted() -> Sequence[PatchPoint]:
    return POINTS if kv_bits.wanted is None else (*POINTS, MAKE_CACHES)


def put_in() -> dict[str, str]:
    """Replaces functions in imported modules: those of wanted(). Returns names of newly rejected ones, with reasons."""
    global _in_force
    begins, _in_force = not _in_force, True
    if begins:
        mx.fast.__class__ = _Watched
        watch_imports()
    left: dict[str, str] = {}
    pairs: list[tuple[Any, Any]] = []
    for point in wanted():
        current = point.current
        if current is None or is_ours(beneath(current)) or id(current) in _left_alone:
            continue
        if why := point.why_not(current):
            _left_alone[id(current)] = current
            left[point.name] = why
        else:
            pairs.append((current, point.ours(current)))
    current = None  # exchange() counts references
    if begins:
        if is_mlx_attention(mlx_attention):
            state.mx_attention = MX_ATTENTION.ours(mlx_attention)
        # A module may hold a function whose place now has another library's, or one from after a reload.
        paths, known = {point.path for point in wanted()}, _original_of.items()
        pairs += [(old, new) for new, old in known if old.__qualname__ in paths and id(old) not in _left_alone]
    exchange(pairs)
    return left


def take_out() -> None:
    """Puts the original functions back wherever the patch's are."""
    global _in_force
    _in_force = False
    _left_alone.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    exchange(list(_original_of.items()))
    # If mx.fast has another library's function, _Watched stays. The library may later put the patch's function back.
    if isinstance(mx.fast, ModuleType) and not is_foreign(MX_ATTENTION, MX_ATTENTION.current):
        mx.fast.__class__ = ModuleType


def exchange(pairs: Sequence[tuple[Any, Any]]) -> None:
    """For each pair (old, new) of functions, rebinds all names of `old` in all modules and patched classes to `new`.

    A library may have saved `old` under such a name, to restore the function later. It then restores `new`.
    """
    instead = {id(old): new for old, new in pairs}
    with lock:
        for point in POINTS:
            if isinstance(owner := point.owner, type):
                _methods[owner] = point.attribute
        _rebind(instead)
        if _are_held_elsewhere(pairs):
            _search_modules(pairs)
            _rebind(instead)


def _rebind(instead: dict[int, Any]) -> None:
    for module, name in _places:
        names: Any = names_in(sys.modules.get(module))
        if id(held := names.get(name)) in instead:
            names[name] = instead[id(held)]
    for cls, name in list(_methods.items()):
        if id(held := vars(cls).get(name)) in instead:
            setattr(cls, name, instead[id(held)])


def _are_held_elsewhere(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether anything but this package refers to a pair's `old`. Usually nothing does.

    Python counts the references to each object, so this takes microseconds. To search all modules takes milliseconds.
    """
    functions = [*(old for old, _ in pairs), object()]  # the object shows the count of what only this list holds
    holders: list[Any] = [functions, *pairs, _original_of, vars(mlx_own), vars(state), globals()]
    holders += [holder for made in _original_of for holder in (vars(made), *made.__closure__)]
    known = _references_from(holders, functions)
    return len({n - m for n, m in zip(map(sys.getrefcount, functions), known, strict=True)}) > 1


def _references_from(holders: Iterable[Any], functions: Sequence[Any]) -> list[int]:
    """How often the holders refer to each function. Must not get a holder twice."""
    before = list(map(sys.getrefcount, functions))
    referents = gc.get_referents(*holders)  # this list refers to a function once more for each reference of a holder
    counts = [after - n for after, n in zip(map(sys.getrefcount, functions), before, strict=True)]
    del referents
    return counts


def _search_modules(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Adds the names of each pair's `old` to `_places`."""
    functions = {id(old): old for old, _ in pairs}
    found = {name: names_in(module) for name, module in list(sys.modules.items()) if name not in OWN_MODULES}
    modules = {module: names for module, names in found.items() if isinstance(names, dict)}
    if any(_references_from(modules.values(), list(functions.values()))):
        for module, names in modules.items():
            _places.update((module, name) for name, held in list(names.items()) if id(held) in functions)


def foreign() -> dict[str, str]:
    """The functions that other libraries have replaced or wrapped: name -> description of the library's function."""
    held = [(point, beneath(point.current)) for point in wanted()]
    return {point.name: _described(current) for point, current in held if is_foreign(point, current)}


def is_foreign(point: PatchPoint, function: Any) -> bool:
    """Whether another library has put `function` at the point.

    The function's `__name__` and `__module__` prove nothing, because functools.wraps copies them.
    """
    if function is None or is_ours(function):
        return False
    if point is MX_ATTENTION:
        return not is_mlx_attention(function)
    return not (type(function) is FunctionType and function.__globals__ is vars(sys.modules[point.module]))


def _described(function: Any) -> str:
    if type(function) is FunctionType:  # functools.wraps does not copy these names
        return f"{function.__globals__.get('__name__', '?')}.{function.__code__.co_qualname}"
    named = function if function.__class__ is type(function) else type(function)
    return f"{getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', type(function).__qualname__)}"


class _Watched(ModuleType):
    """The class of mlx.core.fast while the patch is on, and after that until mx.fast has MLX's own function again.

    A library that replaces the attention function saves the function that it finds, and puts that function back later.
    If the patch has been switched on or off in between, __setattr__() stores the right function instead.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != MX_ATTENTION.attribute:
            ModuleType.__setattr__(self, name, value)  # super() would fail if another thread has changed the class
            return
        with lock:
            value = original_of(value)  # a library may have saved the patch's function while the patch was on
            if _in_force and is_mlx_attention(value):
                value = MX_ATTENTION.ours(value)
            ModuleType.__setattr__(self, name, value)
            if not _in_force and not is_foreign(MX_ATTENTION, value):
                self.__class__ = ModuleType  # type: ignore[assignment]


class _Finder(MetaPathFinder):
    """Replaces mlx-lm's functions whenever a module of HOMES has been imported or reloaded."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in HOMES:
            return None
        # Python ignores a finder without find_spec(), too.
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = spec and spec.loader
        if loader:
            execute = loader.exec_module

            def execute_and_exchange(module: ModuleType) -> None:
                del loader.exec_module  # gives the loader its own method back before the module's code runs
                try:
                    execute(module)
                finally:  # also after an error, because a failed reload may leave new functions in the module
                    with lock:
                        left = put_in() if _in_force else {}
                warn_of(left)

            loader.exec_module = execute_and_exchange
        return spec


def warn_of(left: dict[str, str]) -> None:
    for name, why in left.items():
        warn(f"{name} was not replaced: {why}. It still runs unpatched; all other functions are replaced.")


HOMES = frozenset(point.module for point in POINTS if point is not MX_ATTENTION)
_finder = _Finder()
