"""What can be patched: the seam, where it is, and whether it is still the one this package was tested with.

The seam is the name `scaled_dot_product_attention`. Each model module of mlx-lm imports it from
`mlx_lm.models.base` into its own globals and calls it there: a model is patched by exchanging one global.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

SEAM = "scaled_dot_product_attention"
PACKAGE = "mlx_lm.models"
BASE = PACKAGE + ".base"
CACHE = PACKAGE + ".cache"

Models = str | Iterable[str] | None


def is_original(held: object, module: str = BASE, path: str = SEAM) -> TypeGuard[FunctionType]:
    """Whether this is the function that mlx-lm's `module` defines under the name `path`.

    It is known by the globals it runs in: name, module and docstring are what `functools.wraps` gives a wrapper.
    """
    home = sys.modules.get(module)
    return (
        isinstance(held, FunctionType)
        and home is not None
        and held.__globals__ is vars(home)
        and held.__code__.co_qualname == path
    )


def holders(attribute: str = SEAM) -> Iterator[tuple[str, ModuleType]]:
    """Every imported module, of mlx-lm or not, with a global of this name; base first.

    Base comes first for the sake of imports in other threads: a module that is half imported while this runs
    is either seen here, or has yet to take the name from a base that is patched already.
    """
    for name in [BASE, *(name for name in list(sys.modules) if name != BASE)]:
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and attribute in vars(module):
            yield name, module


def is_mlx_lm(name: str) -> bool:
    """Whether the module is one of mlx_lm.models: the only ones that are patched by themselves."""
    return name.startswith(PACKAGE + ".")


def check_signature(original: Callable[..., Any], tested: Callable[..., Any]) -> None:
    """Raises RuntimeError, naming both signatures, when mlx-lm's function does not take what `tested` takes."""
    here, there = _parameters(tested), _parameters(original)
    if here != there:
        name = f"{original.__module__}.{original.__qualname__}"
        raise RuntimeError(
            f"[enable] {name} takes {there}; this mlxlm-flash-patch was tested with {here}. "
            "Nothing is patched; install the mlx-lm version that mlxlm-flash-patch pins"
        )


def _parameters(function: Callable[..., Any]) -> str:
    """Names, kinds and defaults; annotations do not change how a function is called."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


@cache
def supported() -> tuple[str, ...]:
    """The model types with the seam. Read from mlx-lm's sources: not all modules can be imported everywhere."""
    return tuple(sorted(name for name, source in _sources().items() if _imports_the_seam(source)))


def modules_of(models: Models) -> frozenset[str] | None:
    """The module names that `models` stands for, imported; None, which stands for every module, stays None.

    Raises TypeError when `models` is neither None, a string nor a collection of strings, and ValueError when
    it is empty, or names something that is no model type or has no seam.
    """
    if models is None:
        return None
    wanted = [models] if isinstance(models, str) else models
    # A model is a dict, whose keys would pass for model types.
    if not isinstance(wanted, list | tuple | set | frozenset) or not all(isinstance(m, str) for m in wanted):
        raise TypeError(
            f"[enable] models is a {type(models).__name__}, expected None, a model type or a list of them; "
            "patch_model() takes a model"
        )
    if not wanted:
        raise ValueError("[enable] models is empty, expected None for all, a model type or a list of them")
    names = frozenset(_module_of(model_type) for model_type in wanted)
    for name in names:
        importlib.import_module(name)
    return names


def _module_of(model_type: str) -> str:
    # mlx-lm loads some model types with another one's module: "mistral" is "llama".
    remapping = importlib.import_module("mlx_lm.utils").MODEL_REMAPPING
    stem = remapping.get(model_type, model_type)
    if stem in supported():
        return f"{PACKAGE}.{stem}"
    cure = "'mlxlm-flash status' lists the model types that can be patched"
    if stem not in _sources():
        raise ValueError(f"[enable] models names {model_type!r}, which is no model type of this mlx-lm; {cure}")
    lenders = sorted(_siblings(_sources()[stem]) & set(supported()))
    if lenders:
        cure = f"it builds on {', '.join(map(repr, lenders))}, which can be patched"
    raise ValueError(f"[enable] models names {model_type!r}, which never calls mlx-lm's {SEAM} itself; {cure}")


@cache
def _sources() -> dict[str, str]:
    """Module name in mlx_lm.models → source text. Finds the folder without importing mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise ImportError("mlx-lm is not installed: pip install mlx-lm")
    files = Path(folders[0], "models").glob("*.py")
    return {file.stem: file.read_text(encoding="utf-8") for file in files if file.stem != "__init__"}


def _imports_the_seam(source: str) -> bool:
    return SEAM in source and any(
        node.module == "base" and any(alias.name == SEAM and not alias.asname for alias in node.names)
        for node in _sibling_imports(source)
    )


def _siblings(source: str) -> set[str]:
    """The modules of mlx_lm.models that this one imports: `from .llama import ...`, `from . import llama`."""
    return {name for node in _sibling_imports(source) for name in ([node.module] if node.module else _names(node))}


def _names(node: ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names]


def _sibling_imports(source: str) -> Iterator[ast.ImportFrom]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield node
