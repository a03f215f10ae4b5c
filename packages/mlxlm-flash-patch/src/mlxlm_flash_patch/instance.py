"""One model only: patch_model() gives its attention modules a class whose code calls flash attention.

Neither mlx-lm's modules nor its classes are touched. A generated subclass, with the name of the original, has
the same code objects over again, in which the one global name of the seam means something else.
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

from . import patch, places, registry
from .registry import BASE, SEAM
from .route import instance_attention, routed_attention

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
      ValueError: no module of `model` calls mlx-lm's own scaled_dot_product_attention.
      RuntimeError: mlx-lm's function has another signature than the one tested; both are named.
    """
    _require_module("patch_model", model)
    importlib.import_module(BASE)
    with _lock:
        twins = [(module, _twin(type(module))) for module in _modules(model)]
        if not any(twin in _original_classes for _, twin in twins):
            name = f"{type(model).__module__}.{type(model).__qualname__}"
            raise ValueError(f"[patch_model] model is a {name}, no module of which calls mlx-lm's own {SEAM}")
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


def _twin(cls: type[Module]) -> type[Module]:
    """The subclass of `cls` that calls flash attention; `cls` itself where there is nothing to exchange."""
    if cls in _original_classes:
        return cls
    functions = _functions_with_the_seam(cls)
    if not functions:
        return cls
    # The functions are part of the key: a class that someone has changed since gets another twin.
    key = (cls, *functions.values())
    if key not in _twins:
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce_twin,
            **{name: _exchanged(function) for name, function in functions.items()},
        }
        twin: type[Module] = types.new_class(cls.__name__, (cls,), exec_body=lambda space: space.update(body))
        _original_classes[twin] = cls
        _twins[key] = twin
    return _twins[key]


def _functions_with_the_seam(cls: type[Module]) -> dict[str, FunctionType]:
    """The functions of `cls`, by attribute, in which the seam's name means mlx-lm's own function."""
    attributes = {name: inspect.getattr_static(cls, name, None) for name in dir(cls)}
    found = {}
    for name, function in attributes.items():
        if isinstance(function, FunctionType) and _loads_the_seam(function.__code__):
            held = function.__globals__.get(SEAM)
            if registry.is_original(held):
                places.learn_original(held)
                found[name] = function
            elif held is routed_attention:
                found[name] = function
    return found


def _loads_the_seam(code: CodeType) -> bool:
    # Not `SEAM in code.co_names`: that would also be the attribute of mx.fast.
    return any(i.opname == "LOAD_GLOBAL" and i.argval == SEAM for i in dis.get_instructions(code)) or any(
        _loads_the_seam(inner) for inner in code.co_consts if isinstance(inner, CodeType)
    )


class _Globals(dict[str, Any]):
    """A module's globals in which the seam's name means flash attention.

    It is a view, not a copy, so that later changes of the module are seen: CPython looks a global name up in a
    dict subclass as `globals[name]`, and that asks `__missing__`. Copied are the names with underscores, which
    the import machinery and the making of functions read past `__missing__`; they do not change.
    """

    def __init__(self, module_globals: dict[str, Any]) -> None:
        super().__init__({name: value for name, value in module_globals.items() if name.startswith("__")})
        self[SEAM] = instance_attention
        self._module_globals = module_globals

    def __missing__(self, name: str) -> Any:
        return self._module_globals[name]


def _exchanged(function: FunctionType) -> Callable[..., Any]:
    twin = FunctionType(
        function.__code__,
        _Globals(function.__globals__),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(twin, function)


def _reduce_twin(self: Module, protocol: Any) -> tuple[Any, ...]:
    # pickle finds classes by name, and a twin's name leads to the original: carry that, and make the twin again.
    reduced: Any = super(type(self), self).__reduce_ex__(protocol)
    make, (cls, *arguments), *state = reduced
    return (_rebuild_twin, (make, _original_classes[cls], *arguments), *state)


def _rebuild_twin(make: Any, cls: type[Module], *arguments: Any) -> Any:
    importlib.import_module(BASE)
    with _lock:
        return make(_twin(cls), *arguments)
