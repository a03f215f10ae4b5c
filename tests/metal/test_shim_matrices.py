"""simdgroup_matrix: loads, stores, products, and where in the matrix a lane's elements are."""

import numpy as np
import pytest
from attention64 import decode, encode
from small_kernels import one_kernel

SIZE = (1, 1, 1)


def run(arguments, body, *arrays, outputs=(), defines=()):
    program = one_kernel(arguments, body, *defines)
    buffers = dict(enumerate(arrays))
    return program.run("k", grid=SIZE, threadgroup=(32, 1, 1), buffers=buffers, outputs=outputs).buffers


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
def test_load_and_store(rng, dtype, transpose):
    source = encode(rng.standard_normal((20, 24)), dtype)
    arguments = f"device const {dtype}* in [[buffer(0)]], device {dtype}* out [[buffer(1)]]"
    body = f"""simdgroup_matrix<{dtype}, 8, 8> m;
        simdgroup_load(m, in, 24, ulong2(5, 9), {str(transpose).lower()});
        simdgroup_store(m, out, 8);
        simdgroup_store(m, out + 64, 16, ulong2(8, 1), true);"""
    out = run(arguments, body, source, np.zeros(64 + 16 * 9, source.dtype), outputs={1})[1]
    tile = source[9:17, 5:13]
    tile = tile.T if transpose else tile
    np.testing.assert_array_equal(out[:64].reshape(8, 8), tile)
    np.testing.assert_array_equal(out[64:].reshape(9, 16)[1:9, 8:], tile.T)


def test_lane_layout():
    """Apple's: two neighbours in each lane, a quad of lanes holds 2 rows, 4 columns."""
    body = """simdgroup_float8x8 m;
        simdgroup_load(m, in, 8);
        out[2 * lane] = m.thread_elements()[0];
        out[2 * lane + 1] = m.thread_elements()[1];"""
    arguments = "device const float* in [[buffer(0)]], device float* out [[buffer(1)]]"
    out = run(arguments, body, np.arange(64, dtype=np.float32), np.zeros(64, np.float32), outputs={1})[1]
    quad, lane = np.arange(32) // 4, np.arange(32)
    row, column = (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2
    np.testing.assert_array_equal(out[::2], row * 8 + column)
    np.testing.assert_array_equal(out[1::2], row * 8 + column + 1)
    assert sorted(out) == list(range(64))


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
@pytest.mark.parametrize("result", ["float", "same"])
def test_products(rng, dtype, result):
    result = dtype if result == "same" else result
    a, b, c = (encode(rng.standard_normal((8, 8)), each) for each in (dtype, dtype, result))
    arguments = f"""device const {dtype}* as [[buffer(0)]], device const {dtype}* bs [[buffer(1)]],
        device const {result}* cs [[buffer(2)]], device {result}* out [[buffer(3)]]"""
    body = f"""simdgroup_matrix<{dtype}, 8, 8> a, b; simdgroup_matrix<{result}, 8, 8> c, d;
        simdgroup_load(a, as, 8); simdgroup_load(b, bs, 8); simdgroup_load(c, cs, 8);
        simdgroup_multiply_accumulate(d, a, b, c);
        simdgroup_store(d, out, 8);
        simdgroup_multiply(d, a, b);
        simdgroup_store(d, out + 64, 8);"""
    out = decode(run(arguments, body, a, b, c, np.zeros((2, 8, 8), c.dtype), outputs={3})[3])
    product = decode(a) @ decode(b)
    tolerance = {"float": 1e-6, "half": 2**-10, "bfloat": 2**-7}[result]
    np.testing.assert_allclose(out, [product + decode(c), product], rtol=tolerance, atol=tolerance)


def test_diagonal():
    body = "simdgroup_float8x8 m(3.0f); simdgroup_store(m, out, 8);"
    out = run("device float* out [[buffer(0)]]", body, np.zeros((8, 8), np.float32), outputs={0})[0]
    np.testing.assert_array_equal(out, 3 * np.eye(8))


def test_a_matrix_begins_as_nan():
    body = "simdgroup_float8x8 m; simdgroup_store(m, out, 8);"
    out = run("device float* out [[buffer(0)]]", body, np.zeros((8, 8), np.float32), outputs={0})[0]
    assert np.isnan(out).all()
