"""If mlx-lm's function has another signature than the one tested, enable() refuses and names both."""

import inspect

import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, qwen2

TESTED = "(queries, keys, values, cache, scale, mask, sinks=None)"


@pytest.fixture(
    params=[
        "(queries, keys, values, cache, scale, mask, sinks=None, softcap=None)",
        "(queries, keys, values, cache, scale, mask)",
        "(q, k, v, cache, scale, mask, sinks=None)",
        "(queries, keys, values, cache, scale, mask=None, sinks=None)",
        "(queries, keys, values, cache, scale, mask, *, sinks=None)",
    ]
)
def drifted(request, monkeypatch):
    """Another mlx-lm: a function of its own, in its own module, that takes something else."""
    monkeypatch.setattr(base, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    exec(f"def scaled_dot_product_attention{request.param}: ...", vars(base))
    monkeypatch.setattr(qwen2, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    return request.param


def refused(signature, call):
    with pytest.raises(RuntimeError) as caught:
        call()
    assert signature in str(caught.value)
    assert TESTED in str(caught.value)


@pytest.mark.parametrize("models", [None, "qwen2"])
def test_refused(drifted, models):
    held = qwen2.scaled_dot_product_attention
    refused(drifted, lambda: flash.enable(models))
    assert qwen2.scaled_dot_product_attention is base.scaled_dot_product_attention is held
    assert not flash.status().enabled
    assert not flash.status().patched


def test_a_model_is_refused_too(drifted, tiny):
    model = tiny()
    before = [type(m) for m in model.modules()]
    refused(drifted, lambda: flash.patch_model(model))
    assert [type(m) for m in model.modules()] == before


def test_annotations_do_not_matter(monkeypatch):
    monkeypatch.setattr(base.scaled_dot_product_attention, "__annotations__", {"queries": int})
    with flash.enabled():
        assert flash.status().patched


def test_what_is_put_in_place_has_that_signature(original):
    def bare(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    with flash.enabled():
        assert bare(base.scaled_dot_product_attention) == bare(original)
