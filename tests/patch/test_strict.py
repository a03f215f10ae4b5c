"""With strict, a fallback raises an error. disable() and the end of a `with` block also raise if no kernel ever ran."""

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base

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
    with pytest.raises(flash.FlashNeverRanError, match="never ran"):
        flash.disable()
    assert base.scaled_dot_product_attention is original
    flash.disable()  # raises only once


def test_runs_from_before_do_not_count(tiny, tokens):
    with flash.enabled():
        tiny()(tokens()).tolist()
    with pytest.raises(flash.FlashNeverRanError), flash.enabled(strict=True):
        pass


def test_an_array_that_nobody_evaluates_has_not_run(tiny, tokens):
    with pytest.raises(flash.FlashNeverRanError), flash.enabled(strict=True):
        tiny()(tokens())


def test_a_second_enable_does_not_forget_that_it_ran(tiny, tokens):
    flash.enable(strict=True)
    tiny()(tokens()).tolist()
    flash.enable(strict=True)
    assert str(flash.status()).startswith("flash attention on, strict: ")
    flash.disable()


def test_reset_stats_meanwhile(tiny, tokens):
    """If a program resets flashattn_core's counts, status() counts the calls since the reset."""
    with flash.enabled():
        tiny()(tokens()).tolist()
        with flash.enabled(strict=True):
            flashattn_core.reset_stats()
            tiny()(tokens(1, 12)).tolist()
    assert flash.status().calls == {"cpu_prefill": 2}
