"""Where another library's object sits, it stays: before, between and after; and status() and a warning name it."""

import functools

import mlxlm_flash_patch as flash
import pytest
from arms import calls_of
from mlx_lm.models import base, gemma2, llama, plamo2, qwen2
from mlx_lm.models.cache import KVCache
from mlxlm_flash_patch.described_masks import description_of
from mlxlm_flash_patch.registry import SEAM


@functools.wraps(base.scaled_dot_product_attention)
def scaled_dot_product_attention(*args, **kwargs):
    return theirs.inner(*args, **kwargs)


theirs = scaled_dot_product_attention  # looks like mlx-lm's function in name, module and docstring
theirs.inner = base.scaled_dot_product_attention


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [
        (qwen2, SEAM, "mlx_lm.models.qwen2"),
        (base, SEAM, "mlx_lm.models.base"),
        (plamo2, "mx", "mlx_lm.models.plamo2.mx"),
        (gemma2.Attention, "__call__", "mlx_lm.models.gemma2.Attention.__call__"),
        (base, "create_causal_mask", "mlx_lm.models.base.create_causal_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_in_each_kind_of_place(owner, attribute, name, monkeypatch, original):
    held = vars(owner)[attribute]
    other = object() if attribute == "mx" else functools.wraps(held)(lambda *args, **kwargs: held(*args, **kwargs))
    monkeypatch.setattr(owner, attribute, other)
    with pytest.warns(flash.FlashFallbackWarning, match=rf"\[enable\] {name} holds .*: left alone"):
        flash.enable()
    assert list(flash.status().foreign) == [name]
    assert f"left alone: {name} holds " in str(flash.status())
    assert name not in flash.status().patched
    assert "mlx_lm.models.llama" in flash.status().patched
    flash.disable()
    assert vars(owner)[attribute] is other
    assert llama.scaled_dot_product_attention is original


def test_masks_that_another_library_makes_are_arrays(monkeypatch):
    made = base.create_causal_mask
    monkeypatch.setattr("mlx_lm.models.cache.create_causal_mask", lambda *args, **kwargs: made(*args, **kwargs))
    with pytest.warns(flash.FlashFallbackWarning, match=r"cache\.create_causal_mask holds"):
        flash.enable()
    mask = KVCache().make_mask(6, return_array=True, window_size=None)
    assert description_of(mask, mask[None], 6) is mask


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
    """It is left and named, and what it holds of ours passes calls on to mlx-lm's from then on."""
    flash.enable()
    ours = qwen2.scaled_dot_product_attention
    monkeypatch.setattr(theirs, "inner", ours)
    monkeypatch.setattr(qwen2, SEAM, theirs)
    with pytest.warns(
        flash.FlashFallbackWarning, match=r"\[disable\] mlx_lm.models.qwen2 was overwritten meanwhile by"
    ):
        flash.disable()
    assert qwen2.scaled_dot_product_attention is theirs
    assert llama.scaled_dot_product_attention is original
    assert list(flash.status().foreign) == ["mlx_lm.models.qwen2"]
    assert calls_of(lambda: tiny()(tokens())) == 0
    flash.disable()  # has been said; a second warning would be an error

    monkeypatch.setattr(qwen2, SEAM, ours)  # theirs is taken off again
    for _ in range(2):
        assert calls_of(lambda: tiny()(tokens())) == 0
        with flash.enabled("llama"):
            pass  # another model's patch does not open that way
    with flash.enabled(strict=True):
        tiny()(tokens()).tolist()
    assert qwen2.scaled_dot_product_attention is original


def test_put_over_what_a_patched_model_uses(monkeypatch, tiny):
    model = tiny()
    flash.patch_model(model)
    monkeypatch.setattr(qwen2, SEAM, theirs)
    with pytest.warns(flash.FlashFallbackWarning, match=r"\[unpatch_model\] mlx_lm.models.qwen2 was overwritten"):
        flash.unpatch_model(model)
    assert qwen2.scaled_dot_product_attention is theirs


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
