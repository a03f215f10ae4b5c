"""SIMD-group and quad-group operations against numpy."""

import numpy as np
import pytest
from attention64 import decode, encode
from small_kernels import launcher

NUMPY = {"float": np.float32, "half": np.float16, "bfloat": np.uint16, "int": np.int32, "uint": np.uint32}
LANES = np.arange(32)


def compute(dtype, expression, values, expressions=()):
    """`expressions`: those that are compiled together with this one."""
    arguments = f"device const {dtype}* in [[buffer(0)]], device {dtype}* out [[buffer(1)]]"
    body = f"{dtype} x = in[thread_index]; out[thread_index] = {{}};"
    run = launcher(arguments, [body.format(each) for each in (*expressions, expression)], body.format(expression))
    done = run(grid=(1, 1, 1), threadgroup=(64, 1, 1), buffers={0: values, 1: np.zeros_like(values)}, outputs={1})
    return done.buffers[1]


def draw(rng, dtype):
    if dtype in ("int", "uint"):
        return rng.integers(1, 5, 64).astype(NUMPY[dtype])
    return encode(rng.integers(-8, 8, 64) / 4, dtype)  # small enough for every sum to be exact


REDUCTIONS = [f"{prefix}_{name}(x)" for prefix in ("simd", "quad") for name in ("sum", "max", "min")]


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat", "int", "uint"])
@pytest.mark.parametrize(("name", "reduce"), [("sum", np.sum), ("max", np.max), ("min", np.min)])
@pytest.mark.parametrize(("prefix", "width"), [("simd", 32), ("quad", 4)])
def test_reductions(rng, dtype, name, reduce, prefix, width):
    values = draw(rng, dtype)
    plain = values if dtype in ("int", "uint") else decode(values)
    expected = np.repeat(reduce(plain.reshape(-1, width), axis=1), width)
    result = compute(dtype, f"{prefix}_{name}(x)", values, REDUCTIONS)
    np.testing.assert_array_equal(result if dtype in ("int", "uint") else decode(result), expected)


BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "product": np.multiply}


@pytest.mark.parametrize("name", BITWISE)
def test_integer_reductions(rng, name):
    values = draw(rng, "uint")
    expected = np.repeat(BITWISE[name].reduce(values.reshape(2, 32), axis=1).astype(np.uint32), 32)
    np.testing.assert_array_equal(
        compute("uint", f"simd_{name}(x)", values, [f"simd_{each}(x)" for each in BITWISE]), expected
    )


def test_prefix_sums(rng):
    values = draw(rng, "int")
    rows = values.reshape(2, 32)
    inclusive = np.cumsum(rows, axis=1)
    np.testing.assert_array_equal(compute("int", "simd_prefix_inclusive_sum(x)", values), inclusive.reshape(-1))
    np.testing.assert_array_equal(
        compute("int", "simd_prefix_exclusive_sum(x)", values), (inclusive - rows).reshape(-1)
    )


SHUFFLES = {  # and the lane that each lane's value comes from
    "simd_shuffle(x, 5)": np.full(32, 5),
    "simd_shuffle(x, 31 - lane)": 31 - LANES,
    "simd_broadcast(x, 3)": np.full(32, 3),
    "simd_broadcast_first(x)": np.zeros(32, int),
    "simd_shuffle_xor(x, 8)": LANES ^ 8,
    "simd_shuffle_down(x, 3)": np.where(LANES + 3 < 32, LANES + 3, LANES),
    "simd_shuffle_up(x, 3)": np.where(LANES >= 3, LANES - 3, LANES),
    "simd_shuffle_rotate_down(x, 3)": (LANES + 3) % 32,
    "simd_shuffle_rotate_up(x, 3)": (LANES - 3) % 32,
    "quad_shuffle_xor(x, 2)": LANES ^ 2,
    "quad_broadcast(x, 1)": LANES // 4 * 4 + 1,
}


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat", "int"])
@pytest.mark.parametrize("expression", SHUFFLES)
def test_shuffles(rng, dtype, expression):
    values = draw(rng, dtype)
    result = compute(dtype, expression, values, SHUFFLES)
    np.testing.assert_array_equal(result, values.reshape(2, 32)[:, SHUFFLES[expression]].reshape(-1))


def test_shuffle_and_fill(rng):
    values = draw(rng, "int")
    rows = values.reshape(2, 32)
    up = np.concatenate([100 * rows[:, -3:], rows[:, :-3]], axis=1)
    down = np.concatenate([rows[:, 3:], 100 * rows[:, :3]], axis=1)
    np.testing.assert_array_equal(compute("int", "simd_shuffle_and_fill_up(x, 100 * x, 3)", values), up.reshape(-1))
    np.testing.assert_array_equal(compute("int", "simd_shuffle_and_fill_down(x, 100 * x, 3)", values), down.reshape(-1))


def test_votes():
    values = np.arange(64, dtype=np.int32)
    np.testing.assert_array_equal(compute("int", "simd_any(x == 40)", values), np.repeat([0, 1], 32))
    np.testing.assert_array_equal(compute("int", "simd_all(x < 40)", values), np.repeat([1, 0], 32))


def test_vectors(rng):
    values = draw(rng, "float")
    result = compute("float", "simd_sum(float2(x, 1)).x + simd_shuffle_xor(float2(x, 2 * x), 1).y", values)
    rows = values.reshape(2, 32)
    np.testing.assert_array_equal(result, (rows.sum(axis=1, keepdims=True) + 2 * rows[:, LANES ^ 1]).reshape(-1))


def test_a_lane_beyond_the_group_gives_poison():
    values = np.ones(64, np.float32)
    assert np.isnan(compute("float", "simd_shuffle(x, 40)", values)).all()
