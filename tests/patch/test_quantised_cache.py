"""A quantised KV cache is read by flash attention as it lies: mlx-lm's numbers, and sinks, which mlx-lm refuses."""

import warnings

import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from flashattn_core import NoKernelError
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache
from mlxlm_flash_patch import obstacles, route

MASKS = {
    "none": lambda length, offset: None,
    "causal": lambda length, offset: "causal",
    "window": lambda length, offset: base.create_causal_mask(length, offset, window_size=5),
    "bool": lambda length, offset: mx.random.uniform(shape=(length, offset + length), key=mx.random.key(5)) > 0.3,
    "additive": lambda length, offset: mx.random.normal((length, offset + length), key=mx.random.key(6)),
}


def normal(seed, *shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def filled(bits=8, group_size=32, length=40, dtype=mx.float32, batch=1):
    """(cache, keys, values) as a model has them after `length` tokens, of two heads of 128 elements."""
    cache = QuantizedKVCache(group_size, bits)
    new = [normal(seed, batch, 2, length, 128, dtype=dtype) for seed in (1, 2)]
    return cache, *cache.update_and_fetch(*new)


def attend(queries, filled, mask=None, **options):
    cache, keys, values = filled
    return base.scaled_dot_product_attention(queries, keys, values, cache, 0.09, mask, **options)


def assert_same(on, off, tolerance=1e-4):
    assert on.dtype == off.dtype
    on, off = on.astype(mx.float32), off.astype(mx.float32)
    assert (mx.abs(on - off).max() / mx.abs(off).max()).item() < tolerance


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("length", [1, 5, 17])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 64), (4, 128), (6, 32), (8, 32), (8, 128)])
def test_mlx_lm_s_numbers(bits, group_size, length, mask):
    if bits == 6:  # mlx-lm makes too much room for 6 bits where the head has 128 elements
        keys, values = (mx.quantize(normal(seed, 1, 2, 40, 128), group_size, bits) for seed in (1, 2))
        given = QuantizedKVCache(group_size, bits), keys, values
    else:
        given = filled(bits, group_size)
    queries, seen = normal(3, 1, 6, length, 128), mask(length, 40 - length)
    off = attend(mx.array(queries), given, seen)
    with flash.enabled(strict=True):
        on = attend(queries, given, mask(length, 40 - length))
        mx.eval(on)
    assert_same(on, off)
    assert sum(flash.status().calls.values()) == 1


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bits(dtype):
    """mlx-lm rounds scores and probabilities to the model's dtype: as far as that goes, the same."""
    given, queries = filled(dtype=dtype), normal(3, 1, 6, 9, 128, dtype=dtype)
    off = attend(mx.array(queries), given, "causal")
    with flash.enabled(strict=True):
        on = attend(queries, given, "causal")
        mx.eval(on)
    assert_same(on, off, tolerance=4 * mx.finfo(dtype).eps)


@pytest.mark.parametrize("length", [1, 12])
def test_sinks(length):
    """The numbers of the dequantised cache, which mlx-lm takes sinks with."""
    cache, keys, values = filled()
    floats = [mx.dequantize(*packed, group_size=32, bits=8) for packed in (keys, values)]
    queries, sinks = normal(3, 1, 6, length, 128), normal(4, 6)
    off = base.scaled_dot_product_attention(queries, *floats, None, 0.09, "causal", sinks=sinks)
    with pytest.raises(ValueError, match="sinks"):
        attend(queries, (cache, keys, values), "causal", sinks=sinks)
    with flash.enabled(strict=True):
        on = attend(queries, (cache, keys, values), "causal", sinks=sinks)
        mx.eval(on)
    assert_same(on, off)


def test_left_padding():
    """A row's padding hides its keys; queries that see none are the padding's own."""
    given, queries = filled(batch=2), normal(3, 2, 6, 40, 128)

    def run():
        return attend(mx.array(queries), given, base.create_causal_mask(40, left_padding=mx.array([0, 11])))

    off = run()
    with flash.enabled(strict=True):
        on = run()
        mx.eval(on)
    assert_same(on[0], off[0])
    assert_same(on[1, :, 11:], off[1, :, 11:])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_cache_that_is_quantised_on_the_way(tiny, tokens, bits):
    """Flash attention before and after; the same tokens as without the patch."""
    model, prompt = tiny(), tokens(1, 20)[0]

    def generate():
        steps = generate_step(prompt, model, max_tokens=30, kv_bits=bits, kv_group_size=32, quantized_kv_start=32)
        return [token for token, _ in steps]

    off = generate()
    with flash.enabled(strict=True):
        on = generate()
    assert on == off
    assert flash.status().calls["cpu_decode"] >= 2 * 30
    assert flash.status().fallbacks == {}


def test_queries_keep_their_values():
    """mlx-lm scales them in place, visibly to its caller; no model looks at them afterwards."""
    queries = normal(3, 1, 6, 1, 128)
    before = mx.array(queries)
    with flash.enabled(strict=True):
        mx.eval(attend(queries, filled()))
    assert mx.array_equal(queries, before)


@pytest.mark.parametrize("traced_by", ["grad", "compile"])
def test_traced_calls_fall_back(traced_by):
    """The kernel has no gradient there, mlx-lm's own attention has; which of the two it is, cannot be told."""
    given, queries = filled(), normal(3, 1, 6, 3, 128)

    def total(queries):
        return attend(queries + 0.0, given, "causal").sum()

    traced = {"grad": mx.grad(total), "compile": mx.compile(lambda queries: total(queries))}[traced_by]
    off = traced(queries)
    with flash.enabled(), pytest.warns(flash.FlashFallbackWarning, match="no gradient with a quantised KV cache"):
        on = {"grad": mx.grad(total), "compile": mx.compile(lambda queries: total(queries))}[traced_by](queries)
    assert mx.array_equal(on, off)
    assert flash.status().fallbacks == {f"{obstacles.TRACED} with a quantised KV cache": 1}


def test_queries_of_another_dtype():
    """MLX's products give the wider of the two."""
    given, queries = filled(), normal(3, 1, 6, 3, 128, dtype=mx.bfloat16)
    off = attend(mx.array(queries), given)
    with flash.enabled(strict=True):
        on = attend(queries, given)
        assert_same(on, off, tolerance=2**-7)  # mlx-lm scales queries in their own dtype
    assert on.dtype == mx.float32


def test_no_kernel(monkeypatch):
    """As on Metal, as long as there is none."""

    def refuse(*_, **__):
        raise NoKernelError("no kernels for the moon")

    monkeypatch.setattr(route, "quantized_flash_attention", refuse)
    given, queries = filled(), normal(3, 1, 6, 3, 128)
    off = attend(mx.array(queries), given)
    with flash.enabled(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        on = [attend(mx.array(queries), given) for _ in range(2)]
    assert all(mx.array_equal(out, off) for out in on)
    assert len(warned) == 1
    assert flash.status().fallbacks == {"no kernels for the moon": 2}
