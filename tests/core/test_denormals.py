"""Denormal numbers in inputs and results are rounded, but not flushed to zero.

Only softmax weights below 2^-126 are flushed to zero.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.reference import reference_attention

from tests.core.oracle import DTYPES, draw, to_numpy
from tests.promises import promise

SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
LENGTHS = [(1, 1), (8, 1), (33, 1), (3, 600), (33, 97)]


def denormal(rng, shape, dtype: str) -> np.ndarray:
    """Whole multiples of the dtype's smallest number, all of them denormal."""
    return rng.integers(-100, 101, shape) * SMALLEST[dtype]


def array(numbers: np.ndarray, dtype: str) -> mx.array:
    """Makes an array from the numbers' bits, because MLX's own conversion from float64 may flush denormals to zero."""
    steps = np.rint(np.abs(numbers) / SMALLEST[dtype]).astype(np.uint32)
    sign = np.signbit(numbers)
    if dtype == "float32":
        return mx.array(steps | sign.astype(np.uint32) << 31).view(mx.float32)
    return mx.array((steps | sign.astype(np.uint32) << 15).astype(np.uint16)).view(DTYPES[dtype])


@promise("subnormal float32 numbers keep their values")
@pytest.mark.parametrize(("length", "key_len"), LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(rng, dtype, length, key_len):
    query, key, _ = draw(rng, length=length, key_len=key_len, dtype=dtype)
    numbers = denormal(rng, (1, 2, key_len, 23), dtype)
    out = to_float64(flash_attention(query, key, array(numbers, dtype)), dtype)
    expected, _ = reference_attention(to_numpy(query), to_numpy(key), numbers)
    # In float32, each term of the sum is rounded to a multiple of the smallest number. In every dtype, the result is
    # rounded once. If there is only one key, out is exactly the value of that key.
    steps = np.abs(out - expected) / SMALLEST[dtype]
    assert steps.max() <= (0 if key_len == 1 else 0.51 + (0.5 * key_len if dtype == "float32" else 0))
    assert np.abs(out).max() > 0


def to_float64(a: mx.array, dtype: str) -> np.ndarray:
    """Converts without rounding."""
    if dtype == "float32":
        return np.array(a).astype(np.float64)
    bits = np.array(a.view(mx.uint16))
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize(("length", "key_len"), LENGTHS)
def test_gradients(rng, length, key_len):
    """If out's gradient is denormal, value's gradient is denormal, too. It must not be flushed to zero."""
    query, key, value = draw(rng, length=length, key_len=key_len)
    numbers = denormal(rng, (1, 2, length, 16), "float32")
    *_, dv = mx.vjp(flash_attention, [query, key, value], [array(numbers, "float32")])[1]
    scores = to_numpy(query).astype(np.float64) @ to_numpy(key).astype(np.float64).swapaxes(-1, -2) / 4
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = weights.swapaxes(-1, -2) @ numbers
    got = to_float64(dv, "float32")
    assert (np.abs(got - expected) / SMALLEST["float32"]).max() <= 0.51 + 0.5 * length
    assert np.abs(got).max() > 0
