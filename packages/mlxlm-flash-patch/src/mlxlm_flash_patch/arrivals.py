"""Modules of mlx_lm.models that are imported, or loaded again, while the patch is on.

The patch has to be put into them as soon as they are there. Python asks the finders in sys.meta_path for a module;
ours asks the others, and has the loader that they name say when it is done.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .registry import is_mlx_lm


class _Finder(MetaPathFinder):
    def __init__(self, arrived: Callable[[], object]) -> None:
        self.arrived = arrived

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not is_mlx_lm(fullname):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.arrived()

        loader.exec_module = exec_module  # this loader's alone: finders make one for each module


_finder: _Finder | None = None


def watch(arrived: Callable[[], object] | None) -> None:
    """Calls `arrived()` after each module of mlx_lm.models that is loaded from now on; None: no more."""
    global _finder
    if arrived and _finder is None:
        _finder = _Finder(arrived)
        sys.meta_path.insert(0, _finder)
    elif not arrived and _finder is not None:
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        _finder = None
