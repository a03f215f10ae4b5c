"""A patched model predicts what the unpatched one does: every architecture, prefill and decode."""

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models.cache import make_prompt_cache


def assert_same(on, off):
    error = mx.abs(on - off).max() / mx.abs(off).max()
    assert error.item() < 1e-4


def prefill_and_decode(model, tokens, caches, prefill):
    """Logits of all tokens: `prefill` at once, the others one at a time."""
    logits = [model(tokens[:, :prefill], cache=caches)]
    logits += [model(tokens[:, i : i + 1], cache=caches) for i in range(prefill, tokens.shape[1])]
    result = mx.concatenate(logits, axis=1)
    mx.eval(result)
    return result


@pytest.mark.parametrize("batch", [1, 3], ids=lambda n: f"B{n}")
def test_without_cache(architecture, tiny, tokens, batch):
    model, x = tiny(architecture), tokens(batch, 33)
    off = model(x)
    with flash.enabled(strict=True):
        on = model(x)
        mx.eval(on)
    assert_same(on, off)
    assert flash.status().calls == {"cpu_prefill": 2}


@pytest.mark.parametrize("batch", [1, 3], ids=lambda n: f"B{n}")
def test_the_architecture_s_own_cache(architecture, tiny, tokens, batch):
    model, x = tiny(architecture), tokens(batch, 30)
    off = prefill_and_decode(model, x, make_prompt_cache(model), 17)
    with flash.enabled(strict=True):
        on = prefill_and_decode(model, x, make_prompt_cache(model), 17)
    assert_same(on, off)
    assert flash.status().calls == {"cpu_prefill": 2, "cpu_decode": 2 * 13}
    assert not flash.status().fallbacks


def test_qwen2_in_chunks_with_an_offset(tiny, tokens):
    """A second prompt chunk is causal against a longer key: L < S."""
    model, x = tiny(), tokens(1, 40)

    def chunks():
        cache = make_prompt_cache(model)
        return mx.concatenate([model(x[:, :25], cache=cache), model(x[:, 25:], cache=cache)], axis=1)

    off = chunks()
    with flash.enabled(strict=True):
        on = chunks()
        mx.eval(on)
    assert_same(on, off)
    assert_same(on, model(x))


def test_qwen2_in_bfloat16(tiny, tokens):
    model, x = tiny(dtype=mx.bfloat16), tokens(2, 33)
    off = model(x)
    with flash.enabled(strict=True):
        on = model(x)
        mx.eval(on)
    assert on.dtype == mx.bfloat16
    assert mx.abs(on - off).max().item() < 0.05 * mx.abs(off).max().item()
    assert flash.status().calls == {"cpu_prefill": 2}
