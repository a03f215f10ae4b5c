"""Every module of mlx-lm with the seam gets the routed function, and its own back; none is forgotten."""

import importlib
import pkgutil
import sys

import mlx_lm.models
import mlxlm_flash_patch as flash
import pytest
from mlxlm_flash_patch.registry import supported

SEAM = "scaled_dot_product_attention"


@pytest.fixture(scope="module")
def modules():
    """All of mlx_lm.models that can be imported here: name → module."""
    found = {}
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            found[info.name] = importlib.import_module(f"mlx_lm.models.{info.name}")
        except SystemExit:  # olmo calls exit() when a package of its own is missing
            assert info.name == "olmo"
    return found


def test_supported_is_what_has_the_seam(modules):
    """supported() reads sources, and must not differ from what importing shows."""
    seen = {name for name, module in modules.items() if SEAM in vars(module) and name != "base"}
    assert set(supported()) == seen
    assert {"qwen2", "llama", "qwen3", "gemma3_text", "gpt_oss", "nemotron_h", "lille-130m"} <= seen


def test_all_are_patched_and_restored(modules, original):
    def holders():
        return {name for name, module in modules.items() if vars(module).get(SEAM) is original}

    everything = {*supported(), "base"}
    assert holders() == everything
    flash.enable()
    assert holders() == set()
    assert {name.rpartition(".")[2] for name in flash.status().patched} == everything
    flash.disable()
    assert holders() == everything


@pytest.mark.parametrize("name", supported())
def test_each_by_name(name, modules):
    flash.enable(name)
    assert flash.status().patched == (f"mlx_lm.models.{name}",)


def test_nothing_else_of_the_modules_changes(modules):
    exchanged = {SEAM, "create_causal_mask"}

    def contents():
        return {name: {k: id(v) for k, v in vars(m).items() if k not in exchanged} for name, m in modules.items()}

    before = contents()
    with flash.enabled():
        assert contents() == before
    assert contents() == before


def test_all_are_patched_when_imported_later(modules, monkeypatch):
    flash.enable()
    for name in ("qwen3_moe", "jamba", "iquestloopcoder"):
        monkeypatch.delitem(sys.modules, f"mlx_lm.models.{name}")
        importlib.import_module(f"mlx_lm.models.{name}")
        assert f"mlx_lm.models.{name}" in flash.status().patched
