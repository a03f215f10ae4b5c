"""Importing the package changes nothing, loads nothing of mlx-lm, and is quick."""

import subprocess
import sys

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


def test_the_public_names():
    import mlxlm_flash_patch

    contract = {"enable", "disable", "enabled", "patch_model", "unpatch_model", "status", "Status"}
    assert contract <= set(mlxlm_flash_patch.__all__)
    assert all(getattr(mlxlm_flash_patch, name).__doc__ for name in mlxlm_flash_patch.__all__)
