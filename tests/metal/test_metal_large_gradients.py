"""Gradients of rows with a large maximum are exact. There, lse in float32 would lose the logarithm of the row's sum.

So forward kernels save each row's maximum and sum separately, and backward kernels compute probabilities from these two
numbers. The probabilities are right only if forward and backward kernels round scores in the same way.
"""

import math

import mlx.core as mx
import numpy as np
import pytest

from tests.core.gradient_oracle import Call, unfused_gradients
from tests.core.oracle import DTYPES, draw, to_numpy, unfused
from tests.metal import metal_attention, metal_backward
from tests.promises import promise

SIZES = [("float32", 30), ("float32", 1e3), ("float32", 1e5), ("float16", 30), ("float16", 3e3), ("bfloat16", 1e5)]
DECODE, PREFILL = "metal_decode_split", "metal_prefill_reg"
ROUNDING = {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(params=["metal"])  # the seed of `rng` depends on this name
def gradients(request):
    """Computes gradients from the results of a forward kernel: DECODE for up to 8 queries, PREFILL for more."""

    def of(query, key, value, dout, scale):
        kernel = DECODE if query.shape[-2] <= 8 else PREFILL
        exact_out = query.dtype != mx.float32
        saved = metal_attention.run(query, key, value, scale, kernel=kernel, exact_out=exact_out).saved
        got = metal_backward.run(Call(query, key, value, dout, scale=scale), saved)
        return got.dq, got.dk, got.dv

    return of


def assert_obey_the_rule(got, query, key, value, dout, scale, dtype="float32") -> None:
    """The error may be twice the unfused formula's error, plus the errors of rounding delta to float32 and the result.

    The unfused formula does not compute delta (the product of dout and out), so its error includes no such rounding.
    """
    wide = [x.astype(mx.float32) for x in (query, key, value)]
    _, by_unfused = mx.vjp(lambda *arrays: unfused(*arrays, scale)[0], wide, [dout.astype(mx.float32)])
    largest = [np.abs(to_numpy(x)).max() for x in (query, key)]
    dweight = np.abs(to_numpy(dout) @ to_numpy(value).swapaxes(-1, -2)).max()
    sizes = (scale * largest[1] * dweight, query.shape[-2] * scale * largest[0] * dweight, query.shape[-2])
    exact = unfused_gradients(Call(query, key, value, dout, scale=scale))
    for name, own, other, expected, size in zip(
        ("dq", "dk", "dv"), got, by_unfused, (exact.dq, exact.dk, exact.dv), sizes, strict=True
    ):
        error, allowed = np.abs(to_numpy(own) - expected).max(), 2 * np.abs(to_numpy(other) - expected).max()
        assert error <= allowed + 1e-5 + 2.0**-22 * size + ROUNDING[dtype] * np.abs(expected).max(), name


@promise("on GPUs a large maximum does not lose the sum beside it")
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("score", [1e2, 1e4, 1e5, 1e7, 1e12])
def test_three_equal_keys_have_a_third_each(score, length, gradients):
    random = score * (1 + np.random.default_rng(0).random((1, 8, length, 1)))  # so that scores use all bits of float32
    query, key = mx.array(random.astype(np.float32)), mx.ones((1, 8, 3, 1))
    value, dout = mx.array([1.0, -1.0, 0.0])[:, None] * mx.ones((1, 8, 3, 1)), mx.ones((1, 8, length, 1))
    *_, dv = gradients(query, key, value, dout, 1.0)
    np.testing.assert_allclose(to_numpy(dv), length / 3, rtol=1e-6)


def test_logits_with_an_offset(rng, gradients):
    query, key, value = draw(rng, length=20, key_len=40, dim=8)
    first = mx.arange(8) == 0
    query, key = mx.where(first, 750, query), mx.where(first, 1, key)
    dout = mx.array(rng.standard_normal(query.shape, dtype=np.float32))
    assert_obey_the_rule(gradients(query, key, value, dout, 1.0), query, key, value, dout, 1.0)


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_large_queries_and_keys(rng, dtype, size, gradients):
    assert_obey_the_rule_beside_large_scores(rng, dtype, size, gradients, 40)


def assert_obey_the_rule_beside_large_scores(rng, dtype, size, gradients, length) -> None:
    arrays = draw(rng, length=length, key_len=70, dim=32)
    scale = 1 / math.sqrt(32)
    query, key, value = ((x * times).astype(DTYPES[dtype]) for x, times in zip(arrays, (size, size, 1), strict=True))
    dout = mx.array(rng.standard_normal(query.shape, dtype=np.float32)).astype(DTYPES[dtype])
    assert_obey_the_rule(gradients(query, key, value, dout, scale), query, key, value, dout, scale, dtype)
