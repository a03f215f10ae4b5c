"""16-bit results have exactly the bits of casting to float32, computing, and casting back."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention

from tests.core.oracle import DTYPES, assert_same_bits, draw
from tests.promises import promise

LENGTHS = [(1, 1), (1, 700), (8, 97), (9, 65), (65, 130)]


@promise("on the CPU 16-bit results equal float32 attention rounded once")
@pytest.mark.parametrize(("length", "key_len"), LENGTHS)
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_same_bits_as_float32_and_back(rng, dtype, mask, length, key_len):
    query, key, value = draw(rng, heads=4, length=length, key_len=key_len, dim=40, value_dim=72, dtype=dtype)
    sinks = mx.array([0.5, 1.0, -2.0, 3.0])
    narrow = flash_attention(query, key, value, mask=mask, softcap=3.0, sinks=sinks.astype(query.dtype))
    wide = flash_attention(*(x.astype(mx.float32) for x in (query, key, value)), mask=mask, softcap=3.0, sinks=sinks)
    assert_same_bits(narrow, wide)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_number_is_loaded_exactly(dtype):
    # With one key the output is the value itself, so loading and storing must not change it.
    value = mx.array(np.arange(2**16, dtype=np.uint16)).view(DTYPES[dtype]).reshape(1, 1024, 1, 64)
    query = key = mx.zeros((1, 1024, 1, 4), value.dtype)
    out = flash_attention(query, key, value)
    is_nan = mx.isnan(value)
    assert mx.array_equal(mx.isnan(out), is_nan)
    plus_zero = mx.where(is_nan | (value == 0), 0, value)  # -0 becomes 0, because the sum begins with 0
    assert mx.array_equal(mx.where(is_nan, 0, out), plus_zero)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stores_round_as_mlx_casts_do(rng, dtype):
    # The mean of two values may lie between two 16-bit numbers, even exactly in the middle. It may also be subnormal.
    scale = np.exp2(rng.integers(-26, 16, (1, 64, 1, 64))).astype(np.float32)
    value = mx.array(rng.standard_normal((1, 64, 2, 64), dtype=np.float32) * scale).astype(DTYPES[dtype])
    query, key = mx.zeros((1, 64, 1, 4), value.dtype), mx.zeros((1, 64, 2, 4), value.dtype)
    wide = flash_attention(*(x.astype(mx.float32) for x in (query, key, value)))
    assert_same_bits(flash_attention(query, key, value), wide)


@promise("float16 scores do not overflow")
def test_float16_scores_do_not_overflow():
    # The sum of 64 products of 60 * 60 exceeds float16's largest number. The kernel computes it in float32.
    query = key = mx.full((1, 1, 9, 64), 60.0, mx.float16)
    value = mx.ones((1, 1, 9, 64), mx.float16)
    assert mx.array_equal(flash_attention(query, key, value, scale=1.0), value)
