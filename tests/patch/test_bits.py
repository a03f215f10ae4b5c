"""Attention is computed in float32 and returned in the model's dtype: the bits of casting there and back."""

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base

DTYPES = [mx.bfloat16, mx.float16, mx.float32]


def random(shape, dtype, seed):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
@pytest.mark.parametrize("length", [1, 7, 40], ids=lambda n: f"L{n}")
def test_bits_of_float32(dtype, mask, length):
    q = random((2, 14, length, 64), dtype, 0)
    k, v = random((2, 2, 45, 64), dtype, 1), random((2, 2, 45, 64), dtype, 2)
    if mask == "bool":
        mask = mx.random.bernoulli(0.7, (length, 45), key=mx.random.key(3))
    elif mask == "additive":
        mask = random((2, 1, length, 45), dtype, 3)

    with flash.enabled(strict=True):
        routed = base.scaled_dot_product_attention(q, k, v, cache=None, scale=0.1, mask=mask)
        mx.eval(routed)

    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    expected = flashattn_core.flash_attention(q, k, v, scale=0.1, mask=mask).astype(dtype)
    assert routed.dtype == dtype
    assert mx.array_equal(routed, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_with_sinks(dtype):
    q, k, v = (random((1, 4, 9, 32), dtype, seed) for seed in range(3))
    sinks = random((4,), dtype, 3)

    with flash.enabled(strict=True):
        routed = base.scaled_dot_product_attention(q, k, v, None, 0.2, "causal", sinks)
        mx.eval(routed)

    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    expected = flashattn_core.flash_attention(q, k, v, scale=0.2, mask="causal", sinks=sinks.astype(mx.float32))
    assert mx.array_equal(routed, expected.astype(dtype))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_a_model_of_16_bits_comes_no_further_from_float32(tiny, tokens, dtype):
    exact, rounded = tiny(dtype=mx.float32), tiny(dtype=dtype)
    exact.update(rounded.parameters())
    exact.apply(lambda p: p.astype(mx.float32))
    reference = exact(tokens(2, 33))

    def error():
        return mx.abs(rounded(tokens(2, 33)).astype(mx.float32) - reference).max().item()

    off = error()
    with flash.enabled(strict=True):
        on = error()
    assert on <= 2 * off
