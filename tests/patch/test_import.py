"""Importing the package changes nothing, loads nothing of mlx-lm, and is quick."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import mlxlm_flash_patch
import pytest


def python(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("module", ["mlxlm_flash_patch", "mlxlm_flash_patch.cli"])
def test_nothing_of_mlx_lm_is_imported(module):
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] in ('mlx_lm', 'transformers')])"
    assert python(code) == "[]\n"


def test_neither_do_status_and_disable():
    code = "import sys, mlxlm_flash_patch as f; f.disable(); f.status(); print('mlx_lm' in sys.modules)"
    assert python(code) == "False\n"


def test_nothing_is_patched_by_it():
    code = """
from mlx_lm.models import base, qwen2
before = base.scaled_dot_product_attention
import mlxlm_flash_patch
print(base.scaled_dot_product_attention is before is qwen2.scaled_dot_product_attention)
print(mlxlm_flash_patch.status().patched)
"""
    assert python(code) == "True\n()\n"


def test_nothing_is_changed_by_it():
    """Neither in mlx-lm and MLX, nor in what Python itself imports, warns and ends with."""
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
mlxlm_flash_patch.status()
print((contents(), python()) == before)
"""
    assert python(code) == "True\nTrue\n"


def test_what_is_loaded_by_it():
    """MLX, the core and the standard library: what a start-up file costs is this."""
    code = "import sys, mlxlm_flash_patch; print(*{m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names)"
    ours = {"flashattn_core", "nanobind_backend", "mlxlm_flash_patch", "mlx", "__main__"}
    # The rest comes with the interpreter or MLX, without this package.
    bare = set(python(code.replace("mlxlm_flash_patch", "mlx.core, mlx.nn")).split())
    assert set(python(code).split()) <= ours | bare


def test_installing_changes_nothing():
    """No start-up code: a wheel's files are these, and an editable install's .pth names a folder and no import."""
    files = [file for file in importlib.metadata.files("mlxlm-flash-patch") if file.suffix == ".pth"]
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert all(Path(line).is_dir() for line in lines)
    assert not list(Path(mlxlm_flash_patch.__file__).parents[1].rglob("*.pth"))


def test_the_public_names():
    contract = {"enable", "disable", "enabled", "patch_model", "unpatch_model", "status", "Status"}
    assert contract <= set(mlxlm_flash_patch.__all__)
    assert all(getattr(mlxlm_flash_patch, name).__doc__ for name in mlxlm_flash_patch.__all__)
