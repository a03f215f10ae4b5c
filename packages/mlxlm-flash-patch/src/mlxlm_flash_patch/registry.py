"""What can be patched: which model types, through what, and whether mlx-lm is still the one this was tested with.

models.toml says it for every model type. Most have the seam: the name `scaled_dot_product_attention`, which the
module imports from `mlx_lm.models.base` into its own globals and calls there; it is patched by exchanging one global.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

SEAM = "scaled_dot_product_attention"
PACKAGE = "mlx_lm.models"
BASE = PACKAGE + ".base"
CACHE = PACKAGE + ".cache"

Models = str | Iterable[str] | None


@dataclass(frozen=True)
class Entry:
    """What models.toml says of one model type; its comments say what the fields mean."""

    by: tuple[str, ...] = ()
    through: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    untested: str = ""
    without: str = ""

    @property
    def is_patched(self) -> bool:
        return bool(self.by or self.through)


@cache
def model_types() -> dict[str, Entry]:
    """Model type -> what is known of it."""
    table = tomllib.loads((files(__package__) / "models.toml").read_text(encoding="utf-8"))
    return {name: _entry(fields) for name, fields in table["model_types"].items()}


def _entry(fields: dict[str, Any]) -> Entry:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Entry(**values)


@cache
def supported() -> tuple[str, ...]:
    """The model types that can be patched."""
    return tuple(sorted(name for name, entry in model_types().items() if entry.is_patched))


@cache
def patched_by(means: str) -> tuple[str, ...]:
    """The model types whose own module is patched by "seam", "mx.fast" or "hand-written"."""
    return tuple(name for name, entry in model_types().items() if means in entry.by)


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
    there, here = _parameters(original), _parameters(tested)
    # Annotations do not change how a function is called.
    if [(p.name, p.kind, p.default) for p in there] != [(p.name, p.kind, p.default) for p in here]:
        name, takes, taken = f"{original.__module__}.{original.__qualname__}", _in_words(there), _in_words(here)
        raise RuntimeError(f"[enable] {name} takes {takes}; this mlxlm-flash-patch was tested with {taken}. {_CURE}")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _in_words(parameters: list[inspect.Parameter]) -> str:
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))


def check_source(module: str, function: str, tested: str) -> None:
    """Raises RuntimeError, naming both fingerprints, when a function of mlx_lm.models is not the one tested."""
    here = fingerprint(module, function)
    if here != tested:
        raise RuntimeError(
            f"[enable] {PACKAGE}.{module}.{function} has the fingerprint {here}; "
            f"this mlxlm-flash-patch was tested with {tested}. {_CURE}"
        )


_CURE = "Nothing is patched; install the mlx-lm version that mlxlm-flash-patch pins"


@cache
def fingerprint(module: str, function: str) -> str:
    """Of a function's text in mlx-lm's source, found without importing it; "none" if there is none.

    The text, because bytecode differs between versions of Python.
    """
    path = models_folder() / f"{module}.py"
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    node: ast.AST = ast.parse(source)
    for name in function.split("."):
        inside = {n.name: n for n in getattr(node, "body", []) if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        if name not in inside:
            return "none"
        node = inside[name]
    text = ast.get_source_segment(source, node) or ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def models_folder() -> Path:
    """The folder of mlx_lm.models, found without importing mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise ImportError("mlx-lm is not installed: pip install mlx-lm")
    return Path(folders[0], "models")


def modules_of(models: Models) -> frozenset[str] | None:
    """The module names that `models` stands for, imported; None, which stands for every module, stays None.

    Raises TypeError when `models` is neither None, a string nor a collection of strings, and ValueError when
    it is empty, or names something that is no model type or cannot be patched.
    """
    if models is None:
        return None
    wanted = [models] if isinstance(models, str) else models
    # A model is a dict, whose keys would pass for model types.
    if not isinstance(wanted, list | tuple | set | frozenset) or not all(isinstance(m, str) for m in wanted):
        raise TypeError(
            f"[enable] models is of type {type(models).__name__}, expected None, a model type or a list of them; "
            "patch_model() takes a model"
        )
    if not wanted:
        raise ValueError("[enable] models is empty, expected None for all, a model type or a list of them")
    names = frozenset(name for model_type in wanted for name in _modules_of(model_type))
    for name in names:
        importlib.import_module(name)
    return names


def _modules_of(model_type: str) -> list[str]:
    # mlx-lm loads some model types with another one's module: "mistral" is "llama".
    remapping = importlib.import_module("mlx_lm.utils").MODEL_REMAPPING
    stem = remapping.get(model_type, model_type)
    entry = model_types().get(stem)
    if entry and entry.is_patched:
        return [f"{PACKAGE}.{name}" for name in ([stem] if entry.by else []) + list(entry.through)]
    what = f"of which nothing can be patched: {entry.without}" if entry else "which is no model type of this mlx-lm"
    cure = "'mlxlm-flash status' lists the model types that can be patched"
    raise ValueError(f"[enable] models names {model_type!r}, {what}; {cure}")
