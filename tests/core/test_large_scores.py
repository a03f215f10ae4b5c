"""Scores may be as large as float32 allows. Masks and options may be at the limits of float32, too.

A row's weights depend on the differences of its scores. Float32 rounds a large score by more than 1, but the difference
of two rounded scores is exact. So a kernel must round all scores of a row in the same way.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention, quantized_flash_attention
from flashattn_core.reference import reference_attention
from numpy.typing import ArrayLike

from tests.core.oracle import DTYPES, draw, to_numpy, unfused
from tests.promises import promise

LARGEST = float(mx.finfo(mx.float32).max)
LENGTHS = [1, 20]
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def column(numbers, dtype: str = "float32") -> mx.array:
    """The numbers as an array of shape (1, 1, len(numbers), 1)."""
    return mx.array(np.asarray(numbers, np.float32)).reshape(1, 1, -1, 1).astype(DTYPES[dtype])


def queries(number: float, length: int, dtype: str = "float32") -> mx.array:
    return column(np.full(length, number), dtype)


def assert_is(got: tuple[mx.array, mx.array], out: ArrayLike, lse: ArrayLike) -> None:
    np.testing.assert_allclose(to_numpy(got[0]), out, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(got[1]), lse, rtol=1e-6, atol=1e-6)


def assert_is_float32s(query, key, value, dtype: str, scale: float | None = None, **options) -> None:
    """out must obey oracle.py's rule for float32 arrays. The test also allows for the rounding of out to its dtype."""
    expected, _ = reference_attention(to_numpy(query), to_numpy(key), to_numpy(value), scale, **options)
    wide = (x.astype(mx.float32) for x in (query, key, value))
    error = np.abs(to_numpy(flash_attention(query, key, value, scale, **options)) - expected).max()
    unfused_error = np.abs(to_numpy(unfused(*wide, scale, **options)[0]) - expected).max()
    assert error <= 2 * unfused_error + 1e-5 + ROUNDING[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_key_is_the_result_whatever_its_score(dtype, length):
    for scale in (1000 / 3, 1e4 / 3, 1e9 / 3, 1e22 / 3, -1e9 / 3):
        query, key, value = queries(3000, length, dtype), column([3000], dtype), column([1.5], dtype)
        score = float(query[0, 0, 0, 0]) * float(key[0, 0, 0, 0]) * float(np.float32(scale))
        assert_is(flash_attention(query, key, value, scale, return_lse=True), 1.5, score)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("dtype", "size"), [("float16", 1e3), ("bfloat16", 3e4), ("float32", 1e5), ("float32", 5e8)])
@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"scale": -0.3}], ids=str)
def test_large_queries_and_keys(rng, options, dtype, size, length):
    query, key, value = draw(rng, length=length, key_len=300, dim=32)
    arrays = (x.astype(DTYPES[dtype]) for x in (size * query, size * key, value))
    assert_is_float32s(*arrays, dtype, **options)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [2.0**10, 2.0**20, 2.0**22, 2.0**23])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_differ_by_1(sign, size, length):
    """The scores and their differences are exact in float32."""
    steps = np.arange(300) % 7
    query, key = queries(sign * size, length), column(1 + steps / size)
    weights = np.exp(sign * steps - (6.0 if sign > 0 else 0.0))
    out = to_numpy(flash_attention(query, key, column(steps), 1.0))
    np.testing.assert_allclose(out, (weights * steps).sum() / weights.sum(), rtol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_quantised_key(dtype, bits, length):
    ones = mx.ones((1, 1, 1, 32)).astype(DTYPES[dtype])
    key, value = (mx.quantize(x, 32, bits) for x in (300 * ones, 1.5 * ones))
    for scale in (1 / 3, 1e4 / 3, 1e9 / 3):
        query = mx.broadcast_to(300 * ones, (1, 1, length, 32))
        got = quantized_flash_attention(query, key, value, scale, group_size=32, bits=bits, return_lse=True)
        assert_is(got, 1.5, 32 * 300 * 300 * float(np.float32(scale)))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowest_biases_differ(dtype, length):
    """Some models hide keys by adding the lowest float. Even among such biases, a higher one must win."""
    query, key = queries(0, length, dtype), column([0, 0], dtype)
    lowest, higher = -float(mx.finfo(DTYPES[dtype]).max), -2.5e38
    for biases, out, lse in (([lowest, higher], 1, higher), ([lowest, lowest], 0.5, lowest), ([0, lowest], 0, 0)):
        bias = mx.array([biases]).astype(DTYPES[dtype])
        got = flash_attention(query, key, column([0, 1], dtype), mask=bias, return_lse=True)
        assert_is(got, out, float(bias.max()) if lse else 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_biases_beside_large_scores(rng, length):
    query, key, value = draw(rng, length=length, key_len=40, dim=32)
    bias = 1e4 * mx.array(rng.standard_normal((length, 40), dtype=np.float32))
    assert_is_float32s(300 * query, 300 * key, value, "float32", mask=bias)


AT_THE_LIMITS = [
    *((1, [1, 2], {"softcap": softcap}) for softcap in (1e20, 2.0**101, 2.5e38, LARGEST)),
    (1e19, [1e19, 2e19], {"softcap": 2e36}),  # both scores are capped to the same number
    *(
        (1e15, [1 / scale / 1e15, 2 / scale / 1e15], {"scale": scale, "softcap": softcap})
        for scale, softcap in ((1e-25, 1e20), (1e-30, 1e10), (1e18, 1e-20))
    ),
    *(
        (abs(scale) ** -0.5, np.array([1, 2]) * abs(scale) ** 0.5 / scale, {"scale": scale})
        for scale in (3e38, -3e38, 1e-37)
    ),
    *((1, [3, 4], {"sinks": mx.array([sink])}) for sink in (3e38, -3e38, LARGEST)),
]


@promise("numbers as large as float32 holds keep their differences in scores")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("number", "keys", "options"), AT_THE_LIMITS, ids=str)
def test_softcap_scale_and_sinks_at_the_limits(number, keys, options, length):
    """All queries are `number`, and the values are 0 and 1."""
    query, key, value = queries(number, length), column(keys), column([0, 1])
    options = {"scale": 1.0, **options}
    expected = reference_attention(*map(to_numpy, (query, key, value)), **options)
    assert_is(flash_attention(query, key, value, **options, return_lse=True), *expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_slopes_at_the_end_of_the_range(length):
    """At distance 0 even the largest slope must add nothing."""
    steep, keys = mx.array([LARGEST]), column(np.ones(length))
    value = column(np.arange(length))
    out = flash_attention(queries(1, length), keys, value, 1.0, alibi_slopes=steep)
    assert mx.array_equal(out, value)
