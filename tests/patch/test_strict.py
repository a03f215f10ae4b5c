"""With strict, a fallback raises an error. disable() and the end of a `with` block also raise if no kernel ever ran."""

import gc

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base
from mlxlm_flash_patch import patch_points

from tests.promises import promise


@promise("under strict a fallback raises")
def test_a_fallback_raises(original):
    q = mx.zeros((1, 2, 3, 600))
    with pytest.raises(flash.FlashFallbackError, match="head_dim over 512"), flash.enabled(strict=True):
        base.scaled_dot_product_attention(q, q, q, cache=None, scale=1.0, mask=None)
    assert base.scaled_dot_product_attention is original


@promise("under strict an end without flash attention raises")
def test_disable_raises_if_flash_never_ran(original):
    flash.enable(strict=True)
    with pytest.raises(flash.FlashNeverRanError, match="compile traced earlier"):
        flash.disable()
    assert base.scaled_dot_product_attention is original
    flash.disable()  # raises only once


def test_an_array_that_nobody_evaluates_has_not_run(tiny, tokens):
    with pytest.raises(flash.FlashNeverRanError), flash.enabled(strict=True):
        tiny()(tokens())


def test_what_a_model_ran_that_is_gone_does_not_count(tiny, tokens):
    model = tiny()
    flash.patch_model(model)
    mx.eval(model(tokens()))
    del model
    gc.collect()
    with pytest.raises(flash.FlashNeverRanError), flash.enabled(strict=True):
        pass


def test_another_block_that_begins_meanwhile(tiny, tokens, monkeypatch):
    """A new block begins new counts, here just after the patch is switched off. The old block still knows its calls."""

    def take_out():
        monkeypatch.undo()
        patch_points.take_out()
        flash.enable()

    with flash.enabled(strict=True):
        mx.eval(tiny()(tokens()))
        monkeypatch.setattr(patch_points, "take_out", take_out)
    assert flash.status().enabled
    assert flash.status().calls == {}
