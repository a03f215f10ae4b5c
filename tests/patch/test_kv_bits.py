"""enable(kv_bits=...) makes mlx-lm's functions return quantised caches."""

import sys
import warnings
from contextlib import contextmanager

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import _ext
from mlx_lm import server
from mlx_lm.models import cache as mlx_lm
from mlxlm_flash_patch.caches import release

from tests.patch.arms import is_in
from tests.promises import promise


def kinds(caches):
    return [kinds(c.caches) if isinstance(c, mlx_lm.CacheList) else type(c).__name__ for c in caches]


@contextmanager
def warned(text):
    """Inside the block there is one warning, with this text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(warning.message) for warning in caught] == [text]
    assert caught[0].filename == __file__


def test_caches_are_quantised_while_it_is_on(tiny):
    model = tiny("llama")
    for module in (mlx_lm, sys.modules["mlx_lm.generate"], server):  # they all hold the function
        with flash.enabled(kv_bits=4, kv_group_size=32):
            caches = module.make_prompt_cache(model)
        assert kinds(caches) == ["QuantizedRotatingKVCache", "QuantizedKVCache"]
        assert [(c.bits, c.group_size) for c in caches] == [(4, 32)] * 2
        assert kinds(module.make_prompt_cache(model)) == ["RotatingKVCache", "KVCache"]


def test_the_last_block_with_kv_bits_decides(tiny):
    model = tiny()

    def bits():
        return getattr(mlx_lm.make_prompt_cache(model)[0], "bits", 16)

    with flash.enabled(kv_bits=8, kv_group_size=32):
        with flash.enabled(kv_bits=4, kv_group_size=32), flash.enabled(strict=False):
            assert bits() == 4
        assert bits() == 8
    flash.enable(kv_bits=8, kv_group_size=32)
    flash.enable()  # replaces the arguments
    assert bits() == 16


ITSELF = "the model computes with keys and values itself:"
KEPT = {
    # recurrent state
    "falcon_h1": ([["ArraysCache", "QuantizedKVCache"]] * 2, "layers 0-1 (ArraysCache has no quantised form)"),
    # latent vectors, from which the model picks some
    "deepseek_v32": (
        [["KVCache", "KVCache"]] * 2,
        f"layers 0-1 ({ITSELF} zeros_like(): incompatible function arguments) · "
        f"layers 0-1 ({ITSELF} 'tuple' object has no attribute 'swapaxes')",
    ),
    # attention that the model writes out
    "gemma2": (["KVCache"] * 2, f"layers 0-1 ({ITSELF} expand_dims(): incompatible function arguments)"),
    "phi3small": (
        ["KVCache", "QuantizedKVCache"],
        f"layers 0 ({ITSELF} expand_dims(): incompatible function arguments)",
    ),
}


@promise("a warning names the layers whose caches kv_bits leaves as they are")
@pytest.mark.parametrize("model_type", KEPT)
def test_a_warning_names_layers_that_keep_16_bits(tiny, model_type):
    flash.enable(kv_bits=8, kv_group_size=32)
    model, (expected, why) = tiny(model_type, qk_rope_head_dim=32), KEPT[model_type]
    with warned(f"kv_bits=8: some caches stay as they are: {why}"):
        assert kinds(mlx_lm.make_prompt_cache(model)) == expected
    assert kinds(mlx_lm.make_prompt_cache(model)) == expected  # a model is tried once, and warned of once
    caches = mlx_lm.make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=caches), [c.state for c in caches])


def test_a_trial_prepares_no_kernel(tiny, monkeypatch):
    """The model is called to see what its attention can read. On a GPU, a kernel would be compiled for this call."""
    prepared = []
    for name in ("quick", "attention"):
        own = getattr(_ext, name)
        monkeypatch.setattr(_ext, name, lambda *given, own=own: prepared.append(given) or own(*given))
    model = tiny("llama")
    flash.enable(kv_bits=8, kv_group_size=32)
    with flash.observe(lambda *given: prepared.append(given)):
        caches = mlx_lm.make_prompt_cache(model)
    assert kinds(caches) == ["QuantizedRotatingKVCache", "QuantizedKVCache"]
    assert prepared == []
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    assert len(prepared) == 2


def test_a_model_that_cannot_be_tried(tiny):
    """A model whose call fails with mlx-lm's own caches gets these caches."""

    class Model:
        layers = (0, 1, 2)

        def __call__(self, tokens, cache):
            cache[0].update_and_fetch(mx.zeros((1, 2, 2, 32)), mx.zeros((1, 2, 2, 32)))
            raise KeyError("pixel_values")

    flash.enable(kv_bits=8, kv_group_size=32)
    model = Model()
    why = "a trial call of the model fails: 'pixel_values'"
    with warned(f"kv_bits=8: some caches stay as they are: layers 0-2 ({why})"):
        caches = mlx_lm.make_prompt_cache(model)
    assert kinds(caches) == ["KVCache"] * 3
    assert all(cache.empty() for cache in caches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_bits": 3}, "kv_bits is 3, expected one of 4, 8"),
        ({"kv_bits": True}, "kv_bits is True, expected one of 4, 8"),
        ({"kv_bits": 8.0}, "kv_bits is 8.0, expected one of 4, 8"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_group_size is 48, expected one of 32, 64, 128"),
        ({"kv_bits": 8, "quantized_kv_start": -1}, "quantized_kv_start is -1, expected a whole number, at least 0"),
        ({"kv_bits": 8, "quantized_kv_start": 1.5}, "quantized_kv_start is 1.5, expected a whole number, at least 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole text is compared
        flash.enable(**arguments)
    assert str(caught.value) == f"[enable] {message}"
    assert not is_in()


def test_another_release_of_mlx_lm(monkeypatch):
    monkeypatch.setattr(release, "TEXT", "of another release")
    with pytest.raises(RuntimeError, match=r"kv_bits expects the caches of mlx-lm 0\.32\.0 to 0\.32\.2: the source of"):
        flash.enable(kv_bits=8)
    assert not is_in()
    flash.enable()  # works with any release


def test_a_function_of_another_library(monkeypatch, tiny):
    """Another library's make_prompt_cache() matters only with kv_bits, which could then have no effect."""
    own, name = mlx_lm.make_prompt_cache, "mlx_lm.models.cache.make_prompt_cache"
    monkeypatch.setattr(mlx_lm, "make_prompt_cache", lambda model, max_kv_size=None: own(model, max_kv_size))
    flash.enable()
    assert flash.status().foreign == {}
    why = "another library's function, .*, is in its place"
    with pytest.raises(RuntimeError, match=f"kv_bits cannot replace {name}: {why}"):
        flash.enable(kv_bits=8)
    assert kinds(own(tiny())) == ["KVCache"] * 2
