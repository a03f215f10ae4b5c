"""simdgroup_matrix: loads, stores, products, and where in the matrix a lane's elements are."""

import numpy as np
import pytest
from attention64 import DTYPES, decode, encode
from small_kernels import OUT, run

IN_AND_OUT = "device {0}* out [[buffer(0)]], device const {0}* in [[buffer(1)]]"


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_load_and_store(rng, dtype, transpose):
    source = encode(rng.standard_normal((20, 24)), dtype)
    body = f"""simdgroup_matrix<{dtype}, 8, 8> m;
        simdgroup_load(m, in, 24, ulong2(5, 9), {str(transpose).lower()});
        simdgroup_store(m, out, 8);
        simdgroup_store(m, out + 64, 16, ulong2(8, 1), true);"""
    buffers = {0: np.zeros(64 + 16 * 9, source.dtype), 1: source}
    out = run(body, IN_AND_OUT.format(dtype), buffers, threads=32).buffers[0]
    tile = source[9:17, 5:13].T if transpose else source[9:17, 5:13]
    np.testing.assert_array_equal(out[:64].reshape(8, 8), tile)
    np.testing.assert_array_equal(out[64:].reshape(9, 16)[1:9, 8:], tile.T)


def test_lane_layout():
    """Apple's: two neighbours in each lane, a quad of lanes holds 2 rows, 4 columns."""
    body = """simdgroup_float8x8 m;
        simdgroup_load(m, in, 8);
        out[2 * lane] = m.thread_elements()[0];
        out[2 * lane + 1] = m.thread_elements()[1];"""
    buffers = {0: np.zeros(64, np.float32), 1: np.arange(64, dtype=np.float32)}
    out = run(body, IN_AND_OUT.format("float"), buffers, threads=32).buffers[0]
    quad, lane = np.arange(32) // 4, np.arange(32)
    row, column = (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2
    np.testing.assert_array_equal(out.reshape(32, 2), np.stack([row * 8 + column, row * 8 + column + 1], axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("result", ["float", "same"])
def test_products(rng, dtype, result):
    result = dtype if result == "same" else result
    a, b, c = (encode(rng.standard_normal((8, 8)), each) for each in (dtype, dtype, result))
    arguments = f"""device {result}* out [[buffer(0)]], device const {dtype}* as [[buffer(1)]],
        device const {dtype}* bs [[buffer(2)]], device const {result}* cs [[buffer(3)]]"""
    body = f"""simdgroup_matrix<{dtype}, 8, 8> a, b; simdgroup_matrix<{result}, 8, 8> c, d;
        simdgroup_load(a, as, 8); simdgroup_load(b, bs, 8); simdgroup_load(c, cs, 8);
        simdgroup_multiply_accumulate(d, a, b, c);
        simdgroup_store(d, out, 8);
        simdgroup_multiply(d, a, b);
        simdgroup_store(d, out + 64, 8);"""
    out = decode(run(body, arguments, {0: np.zeros((2, 8, 8), c.dtype), 1: a, 2: b, 3: c}, threads=32).buffers[0])
    product = decode(a) @ decode(b)
    tolerance = {"float": 1e-6, "half": 2**-10, "bfloat": 2**-7}[result]
    np.testing.assert_allclose(out, [product + decode(c), product], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("matrix", "expected"), [("m(3.0f)", 3 * np.eye(8)), ("m", np.full((8, 8), np.nan))], ids=str)
def test_what_a_matrix_begins_as(matrix, expected):
    body = f"simdgroup_float8x8 {matrix}; simdgroup_store(m, out, 8);"
    done = run(body, OUT, {0: np.zeros((8, 8), np.float32)}, threads=32)
    np.testing.assert_array_equal(done.buffers[0], expected)
