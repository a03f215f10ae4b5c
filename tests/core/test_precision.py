"""On the CPU each `precision` gives the same bits, since no CPU kernel rounds probabilities."""

import mlx.core as mx
import pytest
from flashattn_core import flash_attention, plan, quantized_flash_attention
from flashattn_core.masks import SlidingWindow

from tests.core.oracle import DTYPES, assert_same_bits, draw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 5, 70])
def test_the_same_bits(rng, length, dtype):
    call = {"mask": SlidingWindow(40), "softcap": 5.0, "return_lse": True}
    arrays = draw(rng, heads=4, length=length, key_len=90, dim=24, dtype=dtype)
    outputs = [flash_attention(*arrays, **call, precision=precision) for precision in ("float32", "input")]
    for by_float32, by_input in zip(*outputs, strict=True):
        assert_same_bits(by_input, by_float32)
    assert_same_bits(flash_attention(*arrays, **call)[0], outputs[0][0])


@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_bits_of_quantised_keys(rng, bits):
    query, *stored = draw(rng, length=20, key_len=90, dim=64, dtype="float16")
    stored = [mx.quantize(x, bits=bits) for x in stored]
    by_float32, by_input = (
        quantized_flash_attention(query, *stored, mask="causal", bits=bits, precision=precision)
        for precision in ("float32", "input")
    )
    assert_same_bits(by_input, by_float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_of_gradients(rng, dtype):
    arrays = draw(rng, heads=4, length=40, key_len=50, dim=24, dtype=dtype)
    by_float32, by_input = (
        mx.grad(lambda q, k, v, how=precision: flash_attention(q, k, v, mask="causal", precision=how).sum(), (0, 1, 2))(
            *arrays
        )
        for precision in ("float32", "input")
    )
    for got, expected in zip(by_input, by_float32, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("function", [quantized_flash_attention, plan])
def test_another_word_is_refused(rng, function):
    query, *stored = draw(rng, length=20, key_len=90, dim=64)
    stored = [mx.quantize(x) for x in stored]
    with pytest.raises(
        ValueError, match=r"^\[flash_attention\] precision is 'bfloat16', expected 'float32' or 'input'$"
    ):
        function(query, *stored, precision="bfloat16")
