"""Vectors: constructors, swizzles, conversions that keep values and casts that keep bits."""

import numpy as np
import pytest
from small_kernels import launcher, one_kernel

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
    "as_type<float4>(uint4(0x3f800000u))": [1] * 4,
    "float4(as_type<half2>(0x3c004000u), as_type<bfloat2>(0x3f804000u)[0], 0)": [2, 1, 2, 0],
    "float4(dot(float3(1, 2, 3), float3(4, 5, 6)))": [32] * 4,
    "max(float4(1, 5, 3, 0), float4(2))": [2, 5, 3, 2],
    "min(float4(1, 5, 3, 0), 2.0f)": [1, 2, 2, 0],
    "fma(float4(1, 2, 3, 4), float4(2), float4(1))": [3, 5, 7, 9],
    "float4(any(int2(0, 1) != 0), all(int2(0, 1) != 0), 0, 0)": [1, 0, 0, 0],
    "select(float4(1), float4(2), int4(0, 1, 0, 1))": [1, 2, 1, 2],
    "exp2(float4(0, 1, 2, 3))": [1, 2, 4, 8],
    "float4(bfloat4(bfloat(1.5f)))": [1.5] * 4,
    "float4(ulong3{1, 2, 3}[2], sizeof(float3), sizeof(packed_float3), sizeof(half3))": [3, 16, 12, 8],
    "float4(float3(packed[0]), 1)": [0, 1, 2, 1],
}


# A name of the source's own for a vector is a constructor, too.
BODY = """using Pair = vec<float, 2>; typedef half4 Half4;
    (void)Half4(0, 0, 0, 0); (void)Pair(1);
    if (thread_index == 0) out[0] = {};"""


@pytest.mark.parametrize("expression", CASES)
def test_expression(expression):
    arguments = "device float4* out [[buffer(0)]], device const packed_float3* packed [[buffer(1)]]"
    run = launcher(arguments, [BODY.format(each) for each in CASES], BODY.format(expression))
    buffers = {0: np.zeros(4, np.float32), 1: np.arange(3, dtype=np.float32)}
    done = run(grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers=buffers, outputs={0})
    np.testing.assert_array_equal(done.buffers[0], CASES[expression])


def test_vectors_in_memory():
    """float3 takes 16 bytes of a buffer, and an access to one is within bounds."""
    program = one_kernel(
        "device float3* a [[buffer(0)]], device const half4* b [[buffer(1)]]", "a[lane] = float3(b[lane].xyz);"
    )
    source = np.arange(128, dtype=np.float16).reshape(32, 4)
    buffers = {0: np.zeros((32, 4), np.float32), 1: source}
    done = program.run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers=buffers, outputs={0})
    np.testing.assert_array_equal(done.buffers[0][:, :3], source[:, :3])
