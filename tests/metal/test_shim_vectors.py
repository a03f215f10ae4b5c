"""Vectors: constructors, swizzles, conversions that keep values."""

import numpy as np
import pytest
from small_kernels import run

CASES = {
    "float4(1, 2, 3, 4)": [1, 2, 3, 4],
    "float4(7)": [7, 7, 7, 7],
    "float4(float2(1, 2), 3, half(4))": [1, 2, 3, 4],
    "float4(1, float3(2, 3, 4))": [1, 2, 3, 4],
    "float4(int4(1, 2, 3, -4))": [1, 2, 3, -4],
    "float4(half4(1.5h))": [1.5] * 4,
    "vec<float, 4>(vec<float, 2>(1, 2), vec<float, 2>(3, 4))": [1, 2, 3, 4],
    "metal::float4(1, 2, 3, 4).wzyx": [4, 3, 2, 1],
    "float4(1, 2, 3, 4).xxyy * 2": [2, 2, 4, 4],
    "float4(float4(1, 2, 3, 4).zw, 0, 0)": [3, 4, 0, 0],
    "float4(float3{1, 2, 3}, 4)": [1, 2, 3, 4],
    "Pair(1, 2).xyxy": [1, 2, 1, 2],
    "float4(Half4(1, 2, 3, 4))": [1, 2, 3, 4],
    "static_cast<float4>(uint4(1, 2, 3, 4))": [1, 2, 3, 4],
    "fma(float4(1, 2, 3, 4), float4(2), float4(1))": [3, 5, 7, 9],
    "exp2(float4(0, 1, 2, 3))": [1, 2, 4, 8],
    "float4(bfloat4(bfloat(1.5f)))": [1.5] * 4,
    "float4(ulong3{1, 2, 3}[2], sizeof(float3), sizeof(half2), sizeof(half3))": [3, 16, 4, 8],
}
# A name of the source's own for a vector is a constructor, too.
BODY = """using Pair = vec<float, 2>; typedef half4 Half4;
    (void)Half4(0, 0, 0, 0); (void)Pair(1);
    if (thread_index == 0) out[0] = {};"""


@pytest.mark.parametrize("expression", CASES)
def test_expression(expression):
    together = [BODY.format(each) for each in CASES]
    buffers = {0: np.zeros(4, np.float32)}
    done = run(BODY.format(expression), "device float4* out [[buffer(0)]]", buffers, together=together)
    np.testing.assert_array_equal(done.buffers[0], CASES[expression])


def test_vectors_in_memory():
    """float3 takes 16 bytes of a buffer, and an access to one is within bounds."""
    arguments = "device float3* out [[buffer(0)]], device const half4* in [[buffer(1)]]"
    source = np.arange(128, dtype=np.float16).reshape(32, 4)
    done = run(
        "out[lane] = float3(in[lane].xyz);", arguments, {0: np.zeros((32, 4), np.float32), 1: source}, threads=32
    )
    np.testing.assert_array_equal(done.buffers[0][:, :3], source[:, :3])
