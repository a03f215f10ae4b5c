"""strict: what would fall back raises, and so does an end without any flash attention."""

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base


def falls_back():
    """One call that flash attention does not take."""
    q = mx.zeros((1, 2, 3, 600))
    return base.scaled_dot_product_attention(q, q, q, cache=None, scale=1.0, mask=None)


def test_a_fallback_raises(original):
    with pytest.raises(flash.FlashFallbackError, match="head_dim over 512"), flash.enabled(strict=True):
        falls_back()
    assert base.scaled_dot_product_attention is original


def test_without_strict_it_does_not():
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning):
        falls_back()


def test_disable_raises_if_flash_never_ran(original):
    flash.enable(strict=True)
    with pytest.raises(flash.FlashNeverRanError, match="never ran"):
        flash.disable()
    assert base.scaled_dot_product_attention is original
    flash.disable()  # it has been said


def test_disable_is_content_if_it_ran(tiny, tokens):
    flash.enable(strict=True)
    tiny()(tokens()).tolist()
    flash.disable()


def test_runs_from_before_do_not_count(tiny, tokens):
    with flash.enabled():
        tiny()(tokens()).tolist()
    with pytest.raises(flash.FlashNeverRanError), flash.enabled(strict=True):
        pass


def test_a_second_enable_does_not_forget_that_it_ran(tiny, tokens):
    flash.enable(strict=True)
    tiny()(tokens()).tolist()
    flash.enable(strict=True)
    flash.disable()


def test_reset_stats_meanwhile(tiny, tokens):
    """The core's counts may go backwards: runs after that count."""
    with flash.enabled():
        tiny()(tokens()).tolist()
        with flash.enabled(strict=True):
            flashattn_core.reset_stats()
            tiny()(tokens(1, 12)).tolist()
    assert flash.status().calls == {"cpu_prefill": 2}


def test_without_strict_it_need_not_run():
    with flash.enabled():
        pass
    flash.enable()
    flash.disable()


def test_an_array_that_nobody_evaluates_has_not_run(tiny, tokens):
    with pytest.raises(flash.FlashNeverRanError), flash.enabled(strict=True):
        tiny()(tokens())
