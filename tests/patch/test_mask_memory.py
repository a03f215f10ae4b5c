"""Attention takes less memory than a mask of L*S elements, because MLX never evaluates the masks that mlx-lm builds."""

import contextlib

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base
from mlx_lm.models import cache as mlx_caches

from tests.memory import peak_beyond
from tests.patch.arms import batch_caches, normal
from tests.promises import promise

LENGTH, OFFSET = 3000, 1000
BATCH, HEADS, HEAD_DIM = 2, 2, 32
MASK_BYTES = LENGTH * (OFFSET + LENGTH)  # the size of a bool mask for one batch element
PADDING = [0, 37]

CACHES = {
    "KVCache": mlx_caches.KVCache,
    "RotatingKVCache": lambda: mlx_caches.RotatingKVCache(OFFSET + 1),
    "RotatingKVCache, keep": lambda: mlx_caches.RotatingKVCache(OFFSET + 1, keep=4),
    "QuantizedKVCache": lambda: mlx_caches.QuantizedKVCache(32, 8),
    "BatchKVCache": lambda: mlx_caches.BatchKVCache(PADDING),
    "BatchRotatingKVCache": lambda: mlx_caches.BatchRotatingKVCache(OFFSET + 1, PADDING),
}
SMALL = {"num_hidden_layers": 2, "intermediate_size": 32, "hidden_size": 32, "head_dim": 8}


@promise("mlx-lm's mask arrays of L * S are not evaluated")
@pytest.mark.rotate(1, default=8)
@pytest.mark.parametrize("window", [None, 500], ids=lambda w: f"window {w}")
@pytest.mark.parametrize("make_cache", CACHES.values(), ids=CACHES)
def test_a_prompt_in_two_pieces(make_cache, window):
    cache = make_cache()
    for seed, length in ((0, OFFSET), (1, LENGTH)):
        mask = cache.make_mask(length, window_size=window, return_array=True)
        assert isinstance(mask, mx.array)  # the mask that an unpatched model would use
        with flash.enabled(strict=True):
            mask = cache.make_mask(length, window_size=window, return_array=True)
            new = [normal(seed, BATCH, HEADS, length, HEAD_DIM) for _ in range(2)]
            keys, values = cache.update_and_fetch(*new)
            queries = normal(3, BATCH, HEADS, length, HEAD_DIM)
            mx.eval(queries, keys, values)

            def attend(queries=queries, keys=keys, values=values, mask=mask):
                return base.scaled_dot_product_attention(queries, keys, values, cache, 0.2, mask)

            peak = peak_beyond(attend)
    assert peak < MASK_BYTES / 4
    assert flash.status().calls == {"cpu_prefill": 1}
    # A mask that MLX evaluates takes more than the limit above:
    assert peak_beyond(lambda: mask) >= MASK_BYTES


@pytest.mark.rotate(1, default=8)
@pytest.mark.parametrize("model_type", ["qwen2", "llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("batch", [False, True], ids=["one", "batch"])
@pytest.mark.parametrize("one_model", [False, True], ids=["enabled", "patch_model"])
def test_models(tiny, tokens, model_type, batch, one_model):
    """For a prompt of 8,000 tokens, with windows or left padding, a whole model takes less memory than one mask."""
    length = 8000
    model, x = tiny(model_type, **SMALL), tokens(1, length)

    def hidden():
        return model.model(x, cache=batch_caches(model, [5]) if batch else mlx_caches.make_prompt_cache(model))

    if one_model:
        flash.patch_model(model)
    with contextlib.nullcontext() if one_model else flash.enabled(strict=True):
        peak = peak_beyond(hidden)
    assert peak < length * length
