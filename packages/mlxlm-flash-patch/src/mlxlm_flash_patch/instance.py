"""One model only: patch_model() gives its attention modules a class whose code calls flash attention.

Neither mlx-lm's modules nor its classes are touched. A generated subclass, with the name of the original, has
the same code objects over again, in which the global names that are places mean something else; and, where a
function of the class is the place, what enable() would put there.
"""

import dis
import functools
import importlib
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from mlx.nn.layers.base import Module

from . import patch
from .direct import GLOBAL
from .places import Place, places
from .registry import BASE, SEAM

_lock = threading.RLock()
_twins: dict[tuple[Any, ...], type[Module]] = {}  # (class, its functions with the seam) → generated subclass
_original_classes: dict[type[Module], type[Module]] = {}  # and back
_models: weakref.WeakValueDictionary[int, Module] = weakref.WeakValueDictionary()


def patch_model(model: Module) -> None:
    """Routes the attention of this one model through flash attention, until unpatch_model().

    Other models of the same class are not affected, nor are this one's parameters, state and children; copies
    and pickles of it are patched as well. It holds whether or not enable() is in force. Twice is once.

    Raises:
      TypeError: `model` is no mlx.nn.Module.
      ValueError: no module of `model` has mlx-lm's own attention.
      RuntimeError: mlx-lm's function has another signature or text than the one tested; both are named.
    """
    _require_module("patch_model", model)
    importlib.import_module(BASE)
    with _lock:
        modules = _modules(model)
        found = _Found()
        twin_of = {cls: _twin(cls, found) for cls in {type(module) for module in modules}}
        twins = [(module, twin_of[type(module)]) for module in modules]
        if not any(twin in _original_classes for _, twin in twins):
            name = f"{type(model).__module__}.{type(model).__qualname__}"
            raise ValueError(f"[patch_model] model is a {name}, no module of which has mlx-lm's own attention")
        if not patch.is_on() and not _models:
            patch.start_counting()
        for module, twin in twins:
            object.__setattr__(module, "__class__", twin)
        _models[id(model)] = model


def unpatch_model(model: Module) -> None:
    """Gives the modules of a model their own classes back. Does nothing to a model that is not patched.

    Raises TypeError if `model` is no mlx.nn.Module.
    """
    _require_module("unpatch_model", model)
    with _lock:
        for module in _modules(model):
            object.__setattr__(module, "__class__", _original_classes.get(type(module), type(module)))
        _models.pop(id(model), None)


def patched_instances() -> int:
    """How many models given to patch_model() are alive and still patched."""
    return len(_models)


def _require_module(caller: str, model: object) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"[{caller}] model is a {type(model).__name__}, expected an mlx.nn.Module")


def _modules(model: Module) -> list[Module]:
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    return modules


class _Globals(dict[str, Any]):
    """A module's globals in which some names mean something else: `own`.

    It is a view, not a copy, so that later changes of the module are seen: CPython looks a global name up in a
    dict subclass as `globals[name]`, and that asks `__missing__`. Copied are the names with underscores, which
    the import machinery and the making of functions read past `__missing__`; they do not change.
    """

    def __init__(self, module_globals: dict[str, Any], own: dict[str, Any]) -> None:
        super().__init__({name: value for name, value in module_globals.items() if name.startswith("__")})
        self.own: set[str] = set()
        self._module_globals = module_globals
        for name, value in own.items():
            self.exchange(name, value)

    def exchange(self, name: str, value: object) -> None:
        self[name] = value
        self.own.add(name)

    def __missing__(self, name: str) -> Any:
        return self._module_globals[name]


class _Found:
    """The places that there are at one moment, and what modules look like with them exchanged."""

    def __init__(self) -> None:
        self.places = [place for place in places() if not place.for_all]  # masks are made for all models
        self._views: dict[int, _Globals] = {}

    def view(self, module_globals: dict[str, Any]) -> _Globals:
        """A module's globals, but for its places, and its functions that call those."""
        if id(module_globals) not in self._views:
            here = [place for place in self.places if vars(place.owner) is module_globals and _is_known(place)]
            view = _Globals(module_globals, {place.attribute: place.instead for place in here})
            self._views[id(module_globals)] = view
            for name, helper in list(module_globals.items()) if here else []:
                is_own = isinstance(helper, FunctionType) and helper.__globals__ is module_globals
                if is_own and any(_loads(helper.__code__, place.attribute) for place in here):
                    view.exchange(name, _exchanged(helper, view))
        return self._views[id(module_globals)]


def _twin(cls: type[Module], found: _Found) -> type[Module]:
    """The subclass of `cls` that calls flash attention; `cls` itself where there is nothing to exchange."""
    if cls in _original_classes:
        return cls
    functions, replaced = _calling(cls, found), _replaced(cls, found)
    if not functions and not replaced:
        return cls
    # The functions are part of the key: a class that someone has changed since gets another twin.
    key = (cls, *functions.values(), *replaced.values())
    if key not in _twins:
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce_twin,
            **{name: _exchanged(function, found.view(function.__globals__)) for name, function in functions.items()},
            **replaced,
        }
        twin: type[Module] = types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(body))
        _original_classes[twin] = cls
        _twins[key] = twin
    return _twins[key]


def _calling(cls: type[Module], found: _Found) -> dict[str, FunctionType]:
    """The functions of `cls`, by attribute, that call attention by a global name, themselves or through another."""
    attributes = {name: inspect.getattr_static(cls, name, None) for name in dir(cls)}
    functions = {name: value for name, value in attributes.items() if isinstance(value, FunctionType)}
    return {
        name: function
        for name, function in functions.items()
        if any(_loads(function.__code__, own) for own in found.view(function.__globals__).own)
    }


def _replaced(cls: type[Module], found: _Found) -> dict[str, object]:
    """The functions of `cls` that are places, and what is to be there instead."""
    return {
        place.attribute: place.instead
        for place in found.places
        if place.owner in cls.__mro__
        and inspect.getattr_static(cls, place.attribute) is place.held
        and _is_known(place)
    }


def _loads(code: CodeType, name: str) -> bool:
    # Not `name in code.co_names`: that would also be an attribute. Of MLX, the one function is meant.
    if name == GLOBAL and SEAM not in code.co_names:
        inside = False
    else:
        inside = any(i.opname == "LOAD_GLOBAL" and i.argval == name for i in dis.get_instructions(code))
    return inside or any(_loads(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


def _exchanged(function: FunctionType, view: _Globals) -> Callable[..., Any]:
    twin = FunctionType(
        function.__code__,
        view,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(twin, function)


def _is_known(place: Place) -> bool:
    """Whether mlx-lm's own or ours is there; raises RuntimeError if it is mlx-lm's and not the one tested."""
    if place.is_original(place.held):
        place.check(place.held)
        return True
    return place.held is place.ours


def _reduce_twin(self: Module, protocol: Any) -> tuple[Any, ...]:
    # pickle finds classes by name, and a twin's name leads to the original: carry that, and make the twin again.
    reduced: Any = super(type(self), self).__reduce_ex__(protocol)
    make, (cls, *arguments), *state = reduced
    return (_rebuild_twin, (make, _original_classes[cls], *arguments), *state)


def _rebuild_twin(make: Any, cls: type[Module], *arguments: Any) -> Any:
    importlib.import_module(BASE)
    with _lock:
        return make(_twin(cls, _Found()), *arguments)
