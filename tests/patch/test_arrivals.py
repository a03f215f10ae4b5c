"""Modules that are imported, or loaded again, while the patch is on are patched as they arrive, and given back."""

import importlib
import importlib.util
import sys
import types

import mlx.core as mx
import mlx_lm.models
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, cache, llama, qwen2
from mlxlm_flash_patch.registry import SEAM

# One of each kind: module, and the attribute that is exchanged in it.
KINDS = {
    "qwen3": lambda module: module.scaled_dot_product_attention,
    "plamo2": lambda module: module.mx,
    "gemma2": lambda module: module.Attention.__call__,
    "gear": lambda module: module._softcap_attention,
    "phi3small": lambda module: module.Attention._block_sparse_attention,
}
EACH = pytest.mark.parametrize("name", KINDS)


def is_patched(name, module):
    held = KINDS[name](module)
    code = getattr(held, "__code__", None)
    return held is not mx and (code is None or "mlxlm_flash_patch" in code.co_filename)


@EACH
@pytest.mark.parametrize("models", [None, "its own", "llama"])
def test_imported_later(name, models, late):
    flash.enable(name if models == "its own" else models)
    module = late(name)
    assert is_patched(name, module) == (models != "llama")
    flash.disable()
    assert not is_patched(name, module)
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
def test_however_many_have_arrived(name, late, monkeypatch):
    """Each has its own back, and so has the first one, which is the module again."""
    with flash.enabled():
        modules = [late(name) for _ in range(12)]
        assert all(is_patched(name, module) for module in modules)
        monkeypatch.setitem(sys.modules, f"mlx_lm.models.{name}", modules[0])
    assert not any(is_patched(name, module) for module in modules)


def test_the_import_machinery():
    """It is another while the patch is on, once. The spec names the same loader, file and source as without."""
    finders, name = list(sys.meta_path), "mlx_lm.models.gemma2"
    spec = importlib.util.find_spec(name)
    with flash.enabled(), flash.enabled("qwen2"):
        assert len(sys.meta_path) == len(finders) + 1
        watched = importlib.util.find_spec(name)
        assert importlib.util.find_spec("mlx_lm.models.no_such_model") is None
        assert type(importlib.util.find_spec("mlx_lm.utils").loader) is type(spec.loader)
    assert sys.meta_path == finders
    assert type(watched.loader) is type(spec.loader)
    assert (watched.origin, watched.cached, watched.name) == (spec.origin, spec.cached, spec.name)
    assert watched.loader.get_source(name) == spec.loader.get_source(name)


def test_a_folder_without_code(late, tmp_path, monkeypatch):
    """A namespace package has no loader."""
    (tmp_path / "without_code").mkdir()
    monkeypatch.setattr(mlx_lm.models, "__path__", [*mlx_lm.models.__path__, str(tmp_path)])
    with flash.enabled():
        assert late("without_code").__file__ is None


def test_enabling_imports_no_model(command, light):
    """A process pays for the models that it uses."""
    code = """
import sys, mlxlm_flash_patch as flash
flash.enable()
imported = {name for name in sys.modules if name.startswith("mlx_lm.models.")}
assert imported <= {"mlx_lm.models.base", "mlx_lm.models.cache"}, imported
from mlx_lm.models import gemma2, plamo2
assert {"mlx_lm.models.gemma2.Attention.__call__", "mlx_lm.models.plamo2.mx"} <= set(flash.status().patched)
"""
    done = command("python", "-c", code, env=light)
    assert done.returncode == 0, done.stderr


class TestReload:
    """importlib.reload(): the patch stays on, and disable() leaves what a reload alone would have."""

    @pytest.fixture(autouse=True)
    def _as_it_was(self):
        """A reload gives a module other objects: each gets its first ones back, for the tests that follow."""
        before = [(vars(module), dict(vars(module))) for module in (base, cache, qwen2, llama)]
        yield
        flash.disable()
        for variables, values in before:
            variables.clear()
            variables.update(values)

    @pytest.fixture
    def executes(self, monkeypatch):
        """executes(code): from then on a module that is loaded executes this; undo() ends it."""

        def load(code):
            monkeypatch.setattr(type(base.__loader__), "exec_module", lambda loader, module: exec(code, vars(module)))
            return monkeypatch

        return load

    @pytest.mark.parametrize("models", [None, "qwen2"])
    @pytest.mark.parametrize("module", [base, cache, qwen2], ids=lambda m: m.__name__)
    def test_the_patch_stays_on(self, module, models, tiny, tokens):
        flash.enable(models, strict=True)
        before, loader = flash.status(), type(module.__loader__)
        importlib.reload(module)
        assert type(module.__loader__) is type(module.__spec__.loader) is loader
        assert sorted(flash.status().patched) == sorted(before.patched)  # a reload moves a module to the end
        assert flash.status().foreign == {}
        tiny()(tokens()).tolist()
        flash.disable()
        assert flash.status().patched == ()
        tiny()(tokens()).tolist()
        assert flash.status().calls == {"cpu_prefill": 2}

    def test_a_module_that_is_not_wanted_stays_as_it_is(self, original):
        flash.enable("qwen2")
        importlib.reload(llama)
        assert llama.scaled_dot_product_attention is original

    def test_base_gets_its_new_function_back_and_others_what_they_took_from_it(self, original, monkeypatch):
        """Also while a module that is not mlx-lm's keeps the old one."""
        theirs = types.ModuleType("theirs")
        theirs.scaled_dot_product_attention = original
        monkeypatch.setitem(sys.modules, "theirs", theirs)
        flash.enable()
        importlib.reload(base)
        importlib.reload(qwen2)
        flash.disable()
        assert base.scaled_dot_product_attention is not original
        assert base.scaled_dot_product_attention.__globals__ is vars(base)
        assert qwen2.scaled_dot_product_attention is base.scaled_dot_product_attention
        assert llama.scaled_dot_product_attention is theirs.scaled_dot_product_attention is original

    def test_between_two_blocks(self):
        for _ in range(2):
            with flash.enabled():
                assert "mlx_lm.models.base" in flash.status().patched
            importlib.reload(base)
        assert not flash.status().patched

    def test_what_falls_back_goes_to_the_module_s_own_function(self):
        """Also where base has another one since."""
        exec(f"def {SEAM}(queries, keys, values, cache, scale, mask, sinks=None): return 'a later one'", vars(base))
        q = mx.ones((1, 1, 1, 600))
        with flash.enabled():
            with pytest.warns(flash.FlashFallbackWarning):
                assert base.scaled_dot_product_attention(q, q, q, None, 1.0, None) == "a later one"
            assert mx.array_equal(qwen2.scaled_dot_product_attention(q, q, q, None, 1.0, None), q)

    def test_a_base_with_another_signature_is_refused(self, executes):
        """The reload says so, naming both; what it brought stays as it is, and so does the patch elsewhere."""
        flash.enable()
        undo = executes(f"{SEAM} = None\ndef {SEAM}(q, k, v): ...").undo
        with pytest.raises(RuntimeError, match=r"takes \(q, k, v\); .* tested with \(queries, keys, values, cache"):
            importlib.reload(base)
        undo()
        with flash.enabled("llama"):
            pass  # nor is it exchanged when something else changes
        assert base.scaled_dot_product_attention.__code__.co_varnames == ("q", "k", "v")
        assert "mlx_lm.models.qwen2" in flash.status().patched

    def test_one_that_fails(self, executes):
        """The error is the module's own, and the patch stays."""
        flash.enable("qwen2")
        undo = executes(f"from mlx_lm.models.base import {SEAM}\n1 / 0").undo
        with pytest.raises(ZeroDivisionError):
            importlib.reload(qwen2)
        undo()
        assert flash.status().patched == ("mlx_lm.models.qwen2",)

    def test_one_that_fails_and_would_be_refused(self, executes):
        """The module's own error comes first, with the refusal as a note."""
        flash.enable()
        undo = executes(f"def {SEAM}(q): ...\n1 / 0").undo
        with pytest.raises(ZeroDivisionError) as caught:
            importlib.reload(base)
        undo()
        assert "takes (q); this mlxlm-flash-patch was tested with" in caught.value.__notes__[0]
