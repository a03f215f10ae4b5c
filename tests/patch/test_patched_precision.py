"""precision= decides how accurate results are, and whether calls may go to MLX's own attention where that is faster."""

import warnings
from collections import Counter

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import _ext
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlxlm_flash_patch import router

from tests.patch.arms import is_in
from tests.promises import promise

WHY = "cuda_prefill is estimated at 1.5 times MLX's time per pair (never measured)"
LEFT = f"left to MLX's own attention: {WHY} 2"


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that MLX's own attention is estimated to be faster for prompts, as on a GPU that nobody has measured."""
    counts = Counter()
    own_quick, own_attention = _ext.quick, _ext.attention

    def quick(queries, keys, values, scale, mask, sinks, rounds, mlx, mlx_mask, *storage):
        if rounds and queries.shape[-2] > 1:
            counts["cuda_prefill"] += 1
            return mlx(queries, keys, values, scale=scale, mask=mlx_mask, sinks=sinks)
        return own_quick(queries, keys, values, scale, mask, sinks, rounds, mlx, mlx_mask, *storage)

    def attention(arguments, return_lse, stream, mlx, mlx_mask):
        out = own_attention(arguments, return_lse, stream)  # raises errors for bad arguments; `out` is lazy
        if arguments.call.rounds and arguments.call.query_len > 1:
            counts["cuda_prefill"] += 1
        return out

    monkeypatch.setattr(_ext, "quick", quick)
    monkeypatch.setattr(_ext, "attention", attention)
    monkeypatch.setattr(_ext, "left_calls", lambda: dict(counts))
    monkeypatch.setattr(_ext, "reset_left_calls", counts.clear)


def of(model, tokens, steps=2):
    """The logits of a prompt, and of `steps` tokens after it."""
    cache = make_prompt_cache(model)
    out = [model(tokens, cache=cache)]
    out += [model(tokens[:, :1], cache=cache) for _ in range(steps)]
    mx.eval(out)
    return out


def attention(query_len=20, cache=None, quantise=lambda x: x):
    query, key = mx.ones((1, 4, query_len, 64)), mx.ones((1, 2, 20, 64))
    stored = quantise(key)
    mask = "causal" if query_len > 1 else None
    return base.scaled_dot_product_attention(query, stored, stored, cache, 0.125, mask)


# --- The precision that a call gets ----------------------------------------------------------------------------


def precisions(asked):
    return {precision for _, precision in asked}


@promise("the precision of enable() reaches every call")
@pytest.mark.parametrize("options", [{}, {"precision": "input"}, {"precision": "float32"}], ids=str)
def test_each_precision_reaches_flash_attention(asked, options):
    with flash.enabled(**options):
        attention()
    flash.enable(precision="float32")
    flash.enable(**options)  # replaces the precision of the first enable()
    attention()
    assert precisions(asked) == {options.get("precision", "input")}


@pytest.mark.parametrize("precision", ["input", "float32"])
def test_it_reaches_quantised_caches_and_soft_caps(asked, precision):
    rows = [mx.ones((1, heads, 20, 64)) for heads in (4, 2, 2)]
    with flash.enabled(precision=precision):
        attention(cache=QuantizedKVCache(group_size=64, bits=8), quantise=lambda x: mx.quantize(x, 64, 8))
        router.attend(*rows, 0.125, "causal", softcap=50.0)
    assert asked == [("quick", precision), ("long", precision)]


@promise('precision="float32" wins where blocks nest')
def test_float32_wins_where_blocks_nest(asked):
    with flash.enabled(precision="float32"), flash.enabled(precision="input"):
        attention()
    with flash.enabled(precision="input"), flash.enabled(precision="float32"):
        attention()
    assert precisions(asked) == {"float32"}


@pytest.mark.parametrize("word", ["float16", "", None, 32], ids=repr)
@pytest.mark.parametrize("enabled", [False, True])
def test_another_word(word, enabled):
    """An invalid precision raises an error. The patch stays on or off, as it was before."""
    if enabled:
        flash.enable(precision="float32")
    for switch in (flash.enable, lambda precision: flash.enabled(precision=precision).__enter__()):
        with pytest.raises(ValueError, match=rf"\[enable\] precision is {word!r}, expected 'float32' or 'input'"):
            switch(precision=word)
    assert is_in() == enabled


# --- Calls that MLX's own attention computes faster ------------------------------------------------------------


@promise("calls left to MLX are counted apart from fallbacks, and named by status()")
def test_what_is_faster_there_is_left(gpu, tiny, tokens):
    model = tiny()
    off = of(model, tokens())
    with warnings.catch_warnings(), flash.enabled(strict=True):
        warnings.simplefilter("error")
        on = of(model, tokens())
        now = flash.status()
    assert now.calls == {"cpu_decode": 4}
    assert now.fallbacks == {}
    assert now.left == {WHY: 2}
    assert f"calls: cpu_decode 4 · fallbacks: none · {LEFT}" in str(now).splitlines()
    assert mx.array_equal(on[0], off[0])
    assert all(mx.allclose(one, other, atol=1e-5) for one, other in zip(on, off, strict=True))


@promise("strict allows calls that are left to MLX")
def test_strict_is_about_fallbacks_alone(gpu):
    flash.enable(strict=True)
    attention()
    assert flash.status().calls == {}
    assert not flash.status().nothing_ran()
    flash.disable()  # raises no FlashNeverRanError, because a call went to MLX


# --- plain_call() or attend() ----------------------------------------------------------------------------------


@promise("observers see every call, also one left to MLX")
def test_observers_see_calls_that_are_left(gpu):
    seen, around = [], []

    def watch(call, *arguments, **options):
        around.append(call)
        return call(*arguments, **options)

    with flash.enabled(), router.observed(seen.append), flash.observe(watch):
        attention()
    assert [arguments.call.query_len for arguments in seen] == [20]
    assert len(around) == 1
    assert [*flash.status().left.values()] == [1]
