"""enable() and disable(): which objects sit where, before, between and after."""

import sys
import types
import warnings

import mlx.core as mx
import mlx.nn as nn
import mlxlm_flash_patch as flash
import pytest
from arms import patched
from mlx_lm.models import base, llama, qwen2
from mlxlm_flash_patch.registry import SEAM
from soak_checks import occupied


def test_all_and_back(original):
    """Twice is once."""
    flash.enable()
    routed = base.scaled_dot_product_attention
    flash.enable()
    assert routed is not original
    assert base.scaled_dot_product_attention is routed
    assert qwen2.scaled_dot_product_attention is llama.scaled_dot_product_attention is routed
    for _ in range(2):  # without enable(), disable() does nothing
        flash.disable()
        assert all(vars(module)[SEAM] is original for module in (base, qwen2, llama))
        assert not flash.status().enabled


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        *[(models, {"qwen2"}) for models in ("qwen2", ["qwen2"], ("qwen2",), {"qwen2"})],
        (["qwen2", "llama"], {"qwen2", "llama"}),
        ("mistral", {"llama"}),  # mlx-lm loads it as another
        ("gemma3", {"gemma3_text"}),  # these are built of others
        ("qwen3_5_moe", {"qwen3_next"}),
        ("mistral3", {"llama", "ministral3", "mistral4"}),
    ],
    ids=lambda names: " ".join(sorted(names)) if isinstance(names, set) else str(names),
)
def test_some(models, expected, original):
    flash.enable(models)
    assert patched() == expected
    assert base.scaled_dot_product_attention is original


@pytest.mark.parametrize("name", [SEAM, "create_causal_mask"])
@pytest.mark.parametrize("before", [True, False])
def test_another_package(name, before, monkeypatch):
    """Only mlx-lm's modules are patched. Who takes a function from a patched base gives it back."""
    original, theirs = vars(base)[name], types.ModuleType("their_model")
    monkeypatch.setitem(sys.modules, "their_model", theirs)
    if before:
        exec(f"from mlx_lm.models.base import {name}", vars(theirs))
    flash.enable()
    if not before:
        exec(f"from mlx_lm.models.base import {name}", vars(theirs))
    assert vars(base)[name] is not original
    assert vars(theirs)[name] is (original if before else vars(base)[name])
    flash.disable()
    assert vars(theirs)[name] is original


@pytest.mark.parametrize(("first", "second"), [("llama", "qwen2"), (None, "qwen2"), ("qwen2", None)])
@pytest.mark.parametrize("strict", [True, False])
def test_the_second_decides(first, second, strict):
    flash.enable(first, strict=not strict)
    flash.enable(second, strict=strict)
    assert patched() == {"qwen2"} if second else "base" in patched()
    assert flash.status().strict is strict
    flash.enable(strict=False)  # nothing ran here


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
        (5, TypeError, "models is of type int, expected None, a model type or a list of them"),
        (["qwen2", 5], TypeError, "models is of type list"),
        (nn.Linear(2, 2), TypeError, r"models is of type Linear, expected .* patch_model\(\) takes a model"),
    ],
)
def test_names_that_cannot_be_patched(models, error, says):
    """What was in force before stays so."""
    flash.enable("llama")
    with pytest.raises(error, match=says):
        flash.enable(models)
    assert patched() == {"llama"}


@pytest.mark.long("17 seconds")
def test_a_thousand_times(original):
    """With a call each time: nothing grows, all is as it was."""
    x = mx.random.normal((1, 2, 12, 8))

    def switch(times):
        for _ in range(times):
            flash.enable("qwen2", strict=True)
            mx.eval(qwen2.scaled_dot_product_attention(x, x, x, cache=None, scale=1.0, mask="causal"))
            flash.disable()  # raises if flash never ran
        return {**occupied(), "finders": len(sys.meta_path), "filters": len(warnings.filters)}

    before, after = switch(100), switch(1000)
    grown = {name: after[name] - before[name] for name in after}
    assert base.scaled_dot_product_attention is qwen2.scaled_dot_product_attention is original
    assert grown.pop("resident memory, MB") < 1
    assert grown.pop("Python objects") < 100
    assert max(grown.values()) <= 0, grown
