"""One model only: patch_model() gives its attention modules a class whose calls are flash attention.

The class, a subclass of their own with the same name, has the methods that call attention say that the call is a
patched model's. What patch.py puts into mlx-lm's modules for it lets all other calls pass through.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakValueDictionary

from flashattn_core.argument_types import describe
from mlx.nn.layers.base import Module

from . import patch
from .direct import GLOBAL
from .patch import SERVED
from .places import Place, places
from .registry import BASE, SEAM
from .route import call_of_a_patched_model

_twins = WeakValueDictionary[Any, type[Module]]()  # by class, and its methods that call attention
_models = WeakValueDictionary[int, Module]()  # by id


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
    with patch.lock:
        modules = _modules(model)
        twins = _twins_of(type(module) for module in modules)
        patched = [module for module in modules if hasattr(twins[type(module)], SERVED)]
        if not patched:
            raise ValueError(
                f"[patch_model] model is a {_name(type(model))}, no module of which has mlx-lm's own attention"
            )
        for module in patched:
            object.__setattr__(module, "__class__", twins[type(module)])
        patch.serve(patched)
        _models[id(model)] = model


def unpatch_model(model: Module) -> None:
    """Gives the modules of a model their own classes back. Does nothing to a model that is not patched.

    Raises TypeError if `model` is no mlx.nn.Module, or if one of its modules has a class that was derived from a
    patched one.
    """
    _require_module("unpatch_model", model)
    with patch.lock:
        patched = [module for module in _modules(model) if hasattr(type(module), SERVED)]
        for cls in map(type, patched):
            if SERVED not in vars(cls):
                raise TypeError(
                    f"[unpatch_model] model has a {_name(cls)}, a class that was derived from a patched one"
                )
        for module in patched:
            object.__setattr__(module, "__class__", type(module).__bases__[0])
        patch.dismiss(patched)
        _models.pop(id(model), None)


def patched_instances() -> int:
    """How many models given to patch_model() are alive and still patched."""
    return len(_models)


def _require_module(caller: str, model: object) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"[{caller}] model is {describe(model)}, expected an mlx.nn.Module")


def _modules(model: Module) -> list[Module]:
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    return modules


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _twins_of(classes: Iterable[type[Module]]) -> dict[type[Module], type[Module]]:
    """For each class the one whose calls are flash attention; itself where it calls none, or is such a class."""
    # Masks are described for all models, and another library's function is left alone.
    known = [place for place in places() if not place.for_all and place.original is not None]
    return {cls: cls if hasattr(cls, SERVED) else _twin(cls, known) for cls in set(classes)}


def _twin(cls: type[Module], known: list[Place]) -> type[Module]:
    calls = [
        (name, place)
        for name in dir(cls)
        if isinstance(method := inspect.getattr_static(cls, name, None), FunctionType)
        for place in known
        if _leads_to(method, place)
    ]
    for _, place in calls:
        place.check(place.original)
    key = cls, *sorted({(name, place.module) for name, place in calls})
    if calls and key not in _twins:
        return _twins.setdefault(key, _made(cls, {name for name, _ in calls}, {place.module for _, place in calls}))
    return _twins.get(key, cls)


def _leads_to(method: FunctionType, place: Place) -> bool:
    """Whether it is what the place holds, or calls that by name, itself or through a function of its module."""
    if isinstance(place.owner, type):
        return method is place.held
    if method.__globals__ is not vars(place.owner):
        return False
    names = {SEAM if place.attribute == GLOBAL else place.attribute}  # of all of MLX, the one function is meant
    helpers = {
        name
        for name, helper in vars(place.owner).items()
        if isinstance(helper, FunctionType) and helper.__globals__ is method.__globals__
        if _names(helper.__code__, names)
    }
    return _names(method.__code__, names | helpers)


def _names(code: CodeType, names: set[str]) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return not names.isdisjoint(code.co_names) or any(_names(function, names) for function in inner)


def _made(cls: type[Module], methods: set[str], modules: set[str]) -> type[Module]:
    class Twin(cls):  # type: ignore[misc, valid-type]
        def __new__(of, *arguments: Any, **options: Any) -> Any:
            module = super().__new__(of, *arguments, **options)
            patch.serve([module])
            return module

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            # pickle finds classes by name, and a twin's name leads to the original: that one is carried.
            make, (of, *arguments), *state = super().__reduce_ex__(protocol)
            return _rebuild, (make, cls if of is Twin else of, *arguments), *state

    def opening(name: str) -> Callable[..., Any]:
        @wraps(getattr(cls, name))
        def method(self: Module, *arguments: Any, **options: Any) -> Any:
            return call_of_a_patched_model(getattr(super(Twin, self), name), *arguments, **options)

        return method

    for name in methods:
        setattr(Twin, name, opening(name))
    setattr(Twin, SERVED, frozenset(modules))
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Twin, name, getattr(cls, name))
    return Twin


def _rebuild(make: Callable[..., Module], cls: type[Module], *arguments: Any) -> Module:
    """A copy's module, of a twin again, or of a class that was derived from one."""
    importlib.import_module(BASE)
    with patch.lock:
        return make(_twins_of([cls])[cls], *arguments)
