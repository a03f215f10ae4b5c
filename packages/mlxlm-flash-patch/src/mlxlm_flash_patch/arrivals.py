"""When a module of mlx_lm.models has been executed: imported for the first time, or anew by importlib.reload().

A module that is executed while the patch is on brings objects of its own: its classes, the functions that it
defines, and names that it takes from modules that are not patched.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import registry


class Arrivals(MetaPathFinder):
    """Calls `then(module)` after each of them, while it is listening."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def listen(self, on: bool) -> None:
        if on and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        elif not on and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the other finders find, with a loader that says when it is done."""
        if not registry.is_mlx_lm(name):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:  # a namespace package has none, and executes nothing
            spec.loader = _Loader(spec.loader, self._then)  # type: ignore[assignment]
        return spec


class _Loader:
    """The loader of one module until it executes that: then the module has its own again."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException as error:
            try:
                self._then(module)  # a module that was reloaded stays, with what it has by now
            except Exception as another:
                error.add_note(f"And then: {another}")
            raise
        self._then(module)
