"""Where another library's function sits, it stays: before, between and after; and status() and a warning name it."""

import functools

import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base, llama, qwen2

SEAM = "scaled_dot_product_attention"


@functools.wraps(base.scaled_dot_product_attention)
def scaled_dot_product_attention(*args, **kwargs):
    return theirs.inner(*args, **kwargs)


theirs = scaled_dot_product_attention  # looks like mlx-lm's function in name, module and docstring
theirs.inner = base.scaled_dot_product_attention


def test_in_a_model_s_module(monkeypatch, original):
    monkeypatch.setattr(qwen2, SEAM, theirs)
    with pytest.warns(flash.FlashFallbackWarning, match=r"\[enable\] mlx_lm.models.qwen2 holds .*: left alone"):
        flash.enable()
    assert qwen2.scaled_dot_product_attention is theirs
    assert llama.scaled_dot_product_attention is not original
    assert "mlx_lm.models.qwen2" not in flash.status().patched
    assert list(flash.status().foreign) == ["mlx_lm.models.qwen2"]
    flash.disable()
    assert qwen2.scaled_dot_product_attention is theirs


def test_in_base(monkeypatch, original):
    monkeypatch.setattr(base, SEAM, theirs)
    with pytest.warns(flash.FlashFallbackWarning, match=r"mlx_lm.models.base holds"):
        flash.enable()
    assert base.scaled_dot_product_attention is theirs
    assert "mlx_lm.models.qwen2" in flash.status().patched
    flash.disable()
    assert base.scaled_dot_product_attention is theirs
    assert qwen2.scaled_dot_product_attention is original


def test_elsewhere_than_asked_for_is_no_matter(monkeypatch):
    monkeypatch.setattr(llama, SEAM, theirs)
    flash.enable("qwen2")  # a warning would be an error here
    assert flash.status().patched == ("mlx_lm.models.qwen2",)


def test_a_refusal_to_be_quiet_leaves_nothing_behind(monkeypatch, original):
    """With warnings as errors, the warning is the end of enable() and of a block, before anything is changed."""
    monkeypatch.setattr(llama, SEAM, theirs)
    with pytest.raises(flash.FlashFallbackWarning):
        flash.enable()
    with pytest.raises(flash.FlashFallbackWarning), flash.enabled():
        pytest.fail("the block ran")
    assert not flash.status().enabled
    assert qwen2.scaled_dot_product_attention is original


def test_put_over_ours_meanwhile(monkeypatch, original, tiny, tokens):
    """It is left and named, and what it holds of ours is mlx-lm's own way from then on."""
    flash.enable()
    monkeypatch.setattr(theirs, "inner", qwen2.scaled_dot_product_attention)
    monkeypatch.setattr(qwen2, SEAM, theirs)
    with pytest.warns(
        flash.FlashFallbackWarning, match=r"\[disable\] mlx_lm.models.qwen2 was overwritten meanwhile by"
    ):
        flash.disable()
    assert qwen2.scaled_dot_product_attention is theirs
    assert llama.scaled_dot_product_attention is original
    assert list(flash.status().foreign) == ["mlx_lm.models.qwen2"]

    before = flash.status().calls
    tiny()(tokens()).tolist()
    assert flash.status().calls == before
    flash.disable()  # has been said; a second warning would be an error


def test_put_over_ours_and_taken_off_again(monkeypatch, original, tiny, tokens):
    """Our function may come back after disable(): it passes calls on to mlx-lm's, and goes with the next disable()."""
    flash.enable()
    ours = qwen2.scaled_dot_product_attention
    monkeypatch.setattr(qwen2, SEAM, theirs)
    with pytest.warns(flash.FlashFallbackWarning, match="overwritten meanwhile"):
        flash.disable()
    monkeypatch.setattr(qwen2, SEAM, ours)
    before = flash.status().calls
    tiny()(tokens()).tolist()
    assert flash.status().calls == before
    with flash.enabled(strict=True):
        tiny()(tokens()).tolist()
    assert qwen2.scaled_dot_product_attention is original


def test_errors_instead_of_warnings_do_not_stop_disable(monkeypatch, original):
    """Everything is restored before the first word is said."""
    flash.enable()
    monkeypatch.setattr(qwen2, SEAM, theirs)
    monkeypatch.setattr(llama, SEAM, theirs)
    with pytest.raises(flash.FlashFallbackWarning, match=r"\[disable\]"):
        flash.disable()
    assert not flash.status().enabled
    assert base.scaled_dot_product_attention is original
    assert set(flash.status().foreign) == {"mlx_lm.models.qwen2", "mlx_lm.models.llama"}


def test_nothing_foreign():
    assert flash.status().foreign == {}
    with flash.enabled():
        assert flash.status().foreign == {}
