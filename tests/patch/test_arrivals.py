"""Modules that are imported, or loaded again, while the patch is on are patched as they arrive, and given back."""

import importlib
import subprocess
import sys

import mlx.core as mx
import mlx_lm.models
import mlxlm_flash_patch as flash
import pytest

# One of each kind: module, the attribute that is exchanged, and where it is.
KINDS = {
    "qwen3": lambda module: module.scaled_dot_product_attention,
    "plamo2": lambda module: module.mx,
    "gemma2": lambda module: module.Attention.__call__,
    "gear": lambda module: module._softcap_attention,
    "phi3small": lambda module: module.Attention._block_sparse_attention,
}
EACH = pytest.mark.parametrize("name", KINDS)


@pytest.fixture
def late(monkeypatch):
    """late(name): imports a module of mlx_lm.models as if for the first time."""

    def fresh(name):
        monkeypatch.delitem(sys.modules, f"mlx_lm.models.{name}", raising=False)
        monkeypatch.setattr(mlx_lm.models, name, None, raising=False)  # where `from . import name` would look
        return importlib.import_module(f"mlx_lm.models.{name}")

    return fresh


def is_patched(name, module):
    held = KINDS[name](module)
    code = getattr(held, "__code__", None)
    return held is not mx and (code is None or "mlxlm_flash_patch" in code.co_filename)


@EACH
@pytest.mark.parametrize("models", [None, "its own"])
def test_imported_later(name, models, late):
    flash.enable(models and name)
    module = late(name)
    assert is_patched(name, module)
    flash.disable()
    assert not is_patched(name, module)


@EACH
def test_imported_later_when_others_are_wanted(name, late):
    flash.enable("llama")
    assert not is_patched(name, late(name))


@EACH
@pytest.mark.parametrize("models", [None, "its own"])
def test_loaded_again(name, models, late):
    """What was made of the old classes stays patched until the end, and is given back then too."""
    module = late(name)
    flash.enable(models and name)
    old = getattr(module, "Attention", None)
    importlib.reload(module)
    assert is_patched(name, module)
    flash.disable()
    assert not is_patched(name, module)
    if name in ("gemma2", "phi3small"):
        assert old is not module.Attention
        module.Attention = old
        assert not is_patched(name, module)


@EACH
def test_imported_while_off(name, late):
    with flash.enabled():
        pass
    assert not is_patched(name, late(name))


def test_the_finder_is_there_only_while_the_patch_is_on():
    before = list(sys.meta_path)
    with flash.enabled():
        assert len(sys.meta_path) == len(before) + 1
        with flash.enabled("qwen2"):
            assert len(sys.meta_path) == len(before) + 1
    assert sys.meta_path == before


def test_modules_arrive_as_they_do_without():
    """The spec names the same loader, file and source; what is not there is not found."""
    spec = importlib.util.find_spec("mlx_lm.models.gemma2")
    with flash.enabled():
        watched = importlib.util.find_spec("mlx_lm.models.gemma2")
        with pytest.raises(ModuleNotFoundError, match="no_such_model"):
            importlib.import_module("mlx_lm.models.no_such_model")
    assert type(watched.loader) is type(spec.loader)
    assert (watched.origin, watched.cached, watched.name) == (spec.origin, spec.cached, spec.name)
    assert watched.loader.get_source(spec.name) == spec.loader.get_source(spec.name)


def test_a_folder_without_code(late, tmp_path, monkeypatch):
    """A namespace package has no loader."""
    (tmp_path / "without_code").mkdir()
    monkeypatch.setattr(mlx_lm.models, "__path__", [*mlx_lm.models.__path__, str(tmp_path)])
    with flash.enabled():
        assert late("without_code").__file__ is None


@EACH
def test_however_many_have_arrived(name, late, monkeypatch):
    """Each has its own back, and so has the first one, which is the module again."""
    with flash.enabled():
        modules = [late(name) for _ in range(12)]
        assert all(is_patched(name, module) for module in modules)
        monkeypatch.setitem(sys.modules, f"mlx_lm.models.{name}", modules[0])
    assert not any(is_patched(name, module) for module in modules)


def test_enabling_imports_no_model():
    """A process pays for the models that it uses."""
    code = """
import sys, mlxlm_flash_patch as flash
flash.enable()
imported = {name for name in sys.modules if name.startswith("mlx_lm.models.")}
assert imported <= {"mlx_lm.models.base", "mlx_lm.models.cache"}, imported
from mlx_lm.models import gemma2, plamo2
assert {"mlx_lm.models.gemma2.Attention.__call__", "mlx_lm.models.plamo2.mx"} <= set(flash.status().patched)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
