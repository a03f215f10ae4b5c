"""Importing mlxlm_flash_patch, or installing it, changes nothing, and loads no module of mlx-lm."""

import importlib.metadata
from pathlib import Path

import mlxlm_flash_patch
import pytest

from tests.promises import promise


def test_what_is_loaded_by_it(command):
    """Besides MLX, the import, status() and disable() load only the packages in `ours`. mlx-lm is not among them."""
    code = """
import sys
import mlx.core, mlx.nn
bare = {m.split(".")[0] for m in sys.modules}
import mlxlm_flash_patch as flash, mlxlm_flash_patch.cli
flash.disable()
flash.status()
print(*{m.split(".")[0] for m in sys.modules} - bare - sys.stdlib_module_names)
"""
    ours = {"flashattn_core", "nanobind_backend", "mlxlm_flash_patch", "click"}
    assert {"mlxlm_flash_patch"} <= set(command("python", "-c", code).stdout.split()) <= ours


@promise("importing the patch changes nothing")
@pytest.mark.slow("7 seconds")
def test_nothing_is_changed_by_it(command):
    """The import changes nothing in MLX and mlx-lm. Python's import system, warnings and hooks stay as they are."""
    code = """
import builtins, sys, threading, warnings
import mlx.core, mlx.nn, mlx_lm
from mlx_lm.models import base, cache, gemma2, plamo2, qwen2

def contents():
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] in ("mlx", "mlx_lm")]
    classes = [c for m in modules for c in vars(m).values() if isinstance(c, type)]
    return {(id(owner), name): id(value) for owner in modules + classes for name, value in vars(owner).items()}

def python():
    return (list(sys.meta_path), list(sys.path_hooks), list(sys.path), list(warnings.filters), builtins.__import__,
            sys.excepthook, sys.unraisablehook, threading.active_count())

before = contents(), python()
import mlxlm_flash_patch
print((contents(), python()) == before)
print(mlxlm_flash_patch.status().patched, (contents(), python()) == before)
"""
    assert command("python", "-c", code).stdout == "True\n() True\n"


@promise("installing the patch changes nothing")
def test_installing_changes_nothing():
    """The package runs no code when Python starts. The .pth file of an editable install only names a folder."""
    files = [file for file in importlib.metadata.files("mlxlm-flash-patch") if file.suffix == ".pth"]
    assert all(Path(line).is_dir() for file in files for line in file.read_text().splitlines())
    assert not list(Path(mlxlm_flash_patch.__file__).parents[1].rglob("*.pth"))
