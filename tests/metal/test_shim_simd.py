"""SIMD-group operations against numpy."""

import numpy as np
import pytest
from attention64 import decode, encode
from small_kernels import run

NUMPY = {"float": np.float32, "half": np.float16, "bfloat": np.uint16, "int": np.int32, "uint": np.uint32}
LANES = np.arange(32)


def compute(dtype, expression, values, expressions=()):
    """`expressions`: those that are compiled together with this one."""
    body = f"{dtype} x = in[thread_index]; out[thread_index] = {{}};"
    arguments = f"device {dtype}* out [[buffer(0)]], device const {dtype}* in [[buffer(1)]]"
    together = [body.format(each) for each in expressions]
    done = run(body.format(expression), arguments, {0: np.zeros_like(values), 1: values}, together=together)
    return done.buffers[0].reshape(2, 32)


def draw(rng, dtype):
    if dtype in ("int", "uint"):
        return rng.integers(1, 5, 64).astype(NUMPY[dtype])
    return encode(rng.integers(-8, 8, 64) / 4, dtype)  # small enough for every sum to be exact


REDUCTIONS = {"simd_sum(x)": np.sum, "simd_max(x)": np.max}


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("expression", REDUCTIONS)
def test_reductions(rng, dtype, expression):
    values = draw(rng, dtype)
    as_numbers = decode if dtype not in ("int", "uint") else np.asarray
    expected = REDUCTIONS[expression](as_numbers(values).reshape(2, 32), axis=1, keepdims=True)
    result = as_numbers(compute(dtype, expression, values, REDUCTIONS))
    np.testing.assert_array_equal(result, np.repeat(expected, 32, axis=1))


SHUFFLES = {  # and the lane that each lane's value comes from
    "simd_shuffle(x, 5)": np.full(32, 5),
    "simd_shuffle(x, 31 - lane)": 31 - LANES,
    "simd_shuffle_xor(x, 8)": LANES ^ 8,
    "simd_shuffle_xor(x, 31)": LANES ^ 31,
}


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("expression", SHUFFLES)
def test_shuffles(rng, dtype, expression):
    values = draw(rng, dtype)
    result = compute(dtype, expression, values, SHUFFLES)
    np.testing.assert_array_equal(result, values.reshape(2, 32)[:, SHUFFLES[expression]])


def test_votes():
    values = np.arange(64, dtype=np.int32)
    np.testing.assert_array_equal(compute("int", "simd_all(x < 40)", values)[:, 0], [1, 0])


def test_vectors(rng):
    values = draw(rng, "float")
    result = compute("float", "simd_sum(float2(x, 1)).x + simd_shuffle_xor(float2(x, 2 * x), 1).y", values)
    rows = values.reshape(2, 32)
    np.testing.assert_array_equal(result, rows.sum(axis=1, keepdims=True) + 2 * rows[:, LANES ^ 1])


def test_a_lane_beyond_the_group_gives_poison():
    assert np.isnan(compute("float", "simd_shuffle(x, 40)", np.ones(64, np.float32))).all()
