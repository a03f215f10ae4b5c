"""importlib.reload() while the patch is on: the patch stays on, and disable() leaves what a reload alone would have."""

import importlib
import importlib.util
import sys
import types

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, cache, llama, qwen2

SEAM = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def _as_it_was():
    """A reload gives a module other objects: each gets its first ones back, for the tests that follow."""
    before = [(vars(module), dict(vars(module))) for module in (base, cache, qwen2, llama)]
    yield
    flash.disable()
    for variables, values in before:
        variables.clear()
        variables.update(values)


THE_TESTED_ONE = "(queries, keys, values, cache, scale, mask, sinks=None)"


@pytest.mark.parametrize("models", [None, "qwen2"])
@pytest.mark.parametrize("module", [base, cache, qwen2], ids=lambda m: m.__name__)
def test_the_patch_stays_on(module, models, tiny, tokens):
    flash.enable(models, strict=True)
    before = flash.status()
    importlib.reload(module)
    assert sorted(flash.status().patched) == sorted(before.patched)  # a reload moves a module to the end
    assert flash.status().foreign == {}
    tiny()(tokens()).tolist()
    assert flash.status().calls == {"cpu_prefill": 2}
    flash.disable()
    assert flash.status().patched == ()
    tiny()(tokens()).tolist()
    assert flash.status().calls == {"cpu_prefill": 2}


def test_a_module_that_is_not_wanted_stays_as_it_is(original):
    flash.enable("qwen2")
    importlib.reload(llama)
    assert llama.scaled_dot_product_attention is original


def test_base_gets_its_new_function_back_and_others_what_they_took_from_it(original, monkeypatch):
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
    assert llama.scaled_dot_product_attention is original
    assert theirs.scaled_dot_product_attention is original


def test_reloaded_between_two_blocks():
    for _ in range(2):
        with flash.enabled():
            assert "mlx_lm.models.base" in flash.status().patched
        importlib.reload(base)
    assert not flash.status().patched


def test_a_base_with_another_signature_is_refused(monkeypatch):
    """The reload says so, naming both; what it brought stays as it is, and so does the patch elsewhere."""
    flash.enable()

    def edited(module):
        vars(module)["scaled_dot_product_attention"] = None
        exec(f"def {SEAM}(q, k, v): ...", vars(module))

    monkeypatch.setattr(type(base.__loader__), "exec_module", lambda loader, module: edited(module))
    with pytest.raises(RuntimeError, match=r"takes \(q, k, v\); .* tested with \(queries, keys, values, cache"):
        importlib.reload(base)
    monkeypatch.undo()
    with flash.enabled("llama"):
        pass  # nor is it exchanged when something else changes
    assert base.scaled_dot_product_attention.__code__.co_varnames == ("q", "k", "v")
    assert "mlx_lm.models.qwen2" in flash.status().patched


def test_a_reload_that_fails(monkeypatch):
    """The error is the module's own, and the patch stays."""
    flash.enable("qwen2")

    def fails(loader, module):
        exec("from mlx_lm.models.base import scaled_dot_product_attention\n1 / 0", vars(module))

    monkeypatch.setattr(type(base.__loader__), "exec_module", fails)
    with pytest.raises(ZeroDivisionError):
        importlib.reload(qwen2)
    monkeypatch.undo()
    assert flash.status().patched == ("mlx_lm.models.qwen2",)


def test_a_reload_that_fails_and_would_be_refused(monkeypatch):
    """The module's own error comes first, with the refusal as a note."""
    flash.enable()
    monkeypatch.setattr(
        type(base.__loader__), "exec_module", lambda loader, module: exec(f"def {SEAM}(q): ...\n1 / 0", vars(module))
    )
    with pytest.raises(ZeroDivisionError) as caught:
        importlib.reload(base)
    monkeypatch.undo()
    assert "takes (q); this mlxlm-flash-patch was tested with" in caught.value.__notes__[0]


def test_what_falls_back_goes_to_the_module_s_own_function():
    """Also where base has another one since."""
    exec(f"def {SEAM}{THE_TESTED_ONE}: return 'a later one'", vars(base))
    q = mx.ones((1, 1, 1, 600))
    with flash.enabled():
        with pytest.warns(flash.FlashFallbackWarning):
            assert base.scaled_dot_product_attention(q, q, q, None, 1.0, None) == "a later one"
        assert mx.array_equal(qwen2.scaled_dot_product_attention(q, q, q, None, 1.0, None), q)


def test_a_module_that_is_imported_anew(monkeypatch, original):
    """Both module objects have their function back: models of the first may still be alive."""
    flash.enable("qwen2")
    monkeypatch.delitem(sys.modules, "mlx_lm.models.qwen2")
    again = importlib.import_module("mlx_lm.models.qwen2")
    assert again is not qwen2
    assert again.scaled_dot_product_attention is qwen2.scaled_dot_product_attention is not original
    flash.disable()
    assert again.scaled_dot_product_attention is qwen2.scaled_dot_product_attention is original


def test_nothing_is_left_in_the_import_machinery():
    finders = list(sys.meta_path)
    spec, loader = qwen2.__spec__, qwen2.__loader__
    with flash.enabled():
        assert sys.meta_path != finders
        importlib.reload(qwen2)
        assert type(qwen2.__loader__) is type(qwen2.__spec__.loader) is type(loader)
        assert qwen2.__spec__.origin == spec.origin
        assert importlib.util.find_spec("mlx_lm.models.qwen2").loader.get_source("mlx_lm.models.qwen2")
        assert importlib.util.find_spec("mlx_lm.models.no_such_model") is None
    assert sys.meta_path == finders


def test_modules_of_others_pass_by():
    with flash.enabled():
        spec = importlib.util.find_spec("mlx_lm.utils")
    assert type(spec.loader) is type(base.__loader__)
