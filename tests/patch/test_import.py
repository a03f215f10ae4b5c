"""Importing mlxlm_flash_patch, or installing it, changes nothing, and loads no module of mlx-lm."""

import importlib.metadata
from pathlib import Path

import mlxlm_flash_patch
import pytest

from tests.promises import promise


@promise("importing flashattn_core loads only mlx and nanobind's backend")
def test_what_is_loaded_by_it(command):
    """flashattn_core loads only what it requires. The patch, status() and disable() load only click besides."""
    code = """
import sys
import mlx.core

def packages():
    return {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names

bare = packages()
import flashattn_core
core = packages()
import mlx.nn
of_mlx = packages() - core
import mlxlm_flash_patch as flash, mlxlm_flash_patch.cli
flash.disable()
flash.status()
print(*sorted(core - bare))
print(*sorted(packages() - core - of_mlx))
"""
    done = command("python", "-c", code)
    assert done.stdout == "flashattn_core nanobind_backend\nclick mlxlm_flash_patch\n"


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
