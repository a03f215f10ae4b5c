"""enable() and disable(): which objects sit where, before, between and after."""

import importlib
import sys
import types

import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, llama, qwen2

SEAM = "scaled_dot_product_attention"


@pytest.fixture
def late(monkeypatch):
    """late(name): imports a module of mlx_lm.models as if for the first time."""

    def fresh(name):
        monkeypatch.delitem(sys.modules, f"mlx_lm.models.{name}", raising=False)
        return importlib.import_module(f"mlx_lm.models.{name}")

    return fresh


def is_patched(module):
    return "mlx_lm.models." + module.__name__.rpartition(".")[2] in flash.status().patched


def test_all(original):
    flash.enable()
    routed = base.scaled_dot_product_attention
    assert routed is not original
    assert qwen2.scaled_dot_product_attention is routed
    assert llama.scaled_dot_product_attention is routed
    flash.disable()
    assert base.scaled_dot_product_attention is original
    assert qwen2.scaled_dot_product_attention is original
    assert llama.scaled_dot_product_attention is original


@pytest.mark.parametrize("models", ["qwen2", ["qwen2"], ("qwen2",), {"qwen2"}], ids=repr)
def test_one(models, original):
    flash.enable(models)
    assert flash.status().patched == ("mlx_lm.models.qwen2",)
    assert base.scaled_dot_product_attention is original
    assert llama.scaled_dot_product_attention is original


def test_some():
    flash.enable(["qwen2", "llama"])
    assert set(flash.status().patched) == {"mlx_lm.models.qwen2", "mlx_lm.models.llama"}


def test_a_named_model_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx_lm.models.olmo2", raising=False)
    flash.enable("olmo2")
    assert flash.status().patched == ("mlx_lm.models.olmo2",)
    assert "mlx_lm.models.olmo2" in sys.modules


def test_a_model_type_that_mlx_lm_loads_as_another():
    flash.enable("mistral")
    assert flash.status().patched == ("mlx_lm.models.llama",)


@pytest.mark.parametrize(
    ("models", "lenders"),
    [("gemma3", {"gemma3_text"}), ("qwen3_5_moe", {"qwen3_next"}), ("mistral3", {"llama", "ministral3", "mistral4"})],
)
def test_a_model_type_that_is_built_of_others(models, lenders):
    flash.enable(models)
    assert set(flash.status().patched) == {f"mlx_lm.models.{name}" for name in lenders}


def test_imported_later(late, original):
    flash.enable()
    module = late("olmo2")
    assert is_patched(module)
    flash.disable()
    assert module.scaled_dot_product_attention is original


def test_imported_later_when_only_others_are_wanted(late, original):
    flash.enable("qwen2")
    assert late("olmo2").scaled_dot_product_attention is original


def test_imported_later_by_another_package(original, monkeypatch):
    """Whoever takes the function from base while it is patched, takes the routed one, and gives it back."""
    flash.enable()
    theirs = types.ModuleType("their_model")
    monkeypatch.setitem(sys.modules, "their_model", theirs)
    exec(f"from mlx_lm.models.base import {SEAM}", vars(theirs))
    assert vars(theirs)[SEAM] is base.scaled_dot_product_attention
    flash.disable()
    assert vars(theirs)[SEAM] is original


def test_imported_before_by_another_package(original, monkeypatch):
    """Only mlx-lm's own modules are patched."""
    theirs = types.ModuleType("their_model")
    monkeypatch.setitem(sys.modules, "their_model", theirs)
    exec(f"from mlx_lm.models.base import {SEAM}", vars(theirs))
    with flash.enabled():
        assert vars(theirs)[SEAM] is original


def test_twice_is_once(original):
    flash.enable()
    routed = base.scaled_dot_product_attention
    flash.enable()
    assert base.scaled_dot_product_attention is routed
    flash.disable()
    assert base.scaled_dot_product_attention is original
    assert not flash.status().enabled


@pytest.mark.parametrize(
    ("first", "second", "patched", "not_patched"),
    [("llama", "qwen2", qwen2, llama), (None, "qwen2", qwen2, base), ("qwen2", None, base, None)],
)
def test_the_second_decides_what_is_patched(first, second, patched, not_patched):
    flash.enable(first)
    flash.enable(second)
    assert is_patched(patched)
    assert not_patched is None or not is_patched(not_patched)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_the_second_decides_about_strict(first, second):
    flash.enable(strict=first)
    flash.enable(strict=second)
    assert flash.status().strict is second
    flash.enable(strict=False)  # nothing ran here


def test_disable_without_enable(original):
    flash.disable()
    assert base.scaled_dot_product_attention is original


@pytest.mark.parametrize(
    ("models", "error", "says"),
    [
        ("foo", ValueError, r"\[enable\] models names 'foo', which is no model type .* 'mlxlm-flash status' lists"),
        (["qwen2", "foo"], ValueError, "'foo'"),
        ("qwen2.Attention", ValueError, "'qwen2.Attention'"),
        ("../qwen2", ValueError, "'../qwen2'"),
        ("base", ValueError, "'base'"),
        ("mamba", ValueError, r"'mamba', of which nothing can be patched: state-space layers"),
        ("olmo", ValueError, "'olmo', of which nothing .* mlx-lm's own code fails on it"),  # importing it calls exit()
        ([], ValueError, "models is empty"),
        ("", ValueError, "names ''"),
        (5, TypeError, "models is a int, expected None, a model type or a list of them"),
        (["qwen2", 5], TypeError, "models is a list"),
    ],
)
def test_names_that_cannot_be_patched(models, error, says, original):
    with pytest.raises(error, match=says):
        flash.enable(models)
    assert not flash.status().patched
    assert not flash.status().enabled


def test_a_model_is_not_a_name(tiny):
    with pytest.raises(TypeError, match=r"models is a Model, expected .* patch_model\(\) takes a model"):
        flash.enable(tiny())


def test_a_refusal_leaves_an_earlier_enable_in_force():
    flash.enable("qwen2")
    with pytest.raises(ValueError, match="foo"):
        flash.enable("foo")
    assert flash.status().patched == ("mlx_lm.models.qwen2",)


def test_a_function_kept_from_then_is_mlx_lm_s_now(tiny, tokens):
    """What disable() cannot reach, such as an alias, must not go on routing."""
    flash.enable()
    alias = base.scaled_dot_product_attention
    flash.disable()
    flash.enable("llama")
    flash.disable()
    before = flash.status().calls
    q = tiny().model.embed_tokens(tokens(1, 12))[None]
    alias(q, q, q, cache=None, scale=1.0, mask="causal").tolist()
    assert flash.status().calls == before
    assert not flash.status().fallbacks
