"""Constructs of Metal that C++ lacks, and that the tests of the kernels do not cover."""

import numpy as np
import pytest

from tests.emulators.metal_on_cpu import CompileError
from tests.emulators.small_kernels import compile_text, run_text


def launch(text):
    return run_text(text, buffers={0: np.zeros(32, np.float32)}, outputs={0}).buffers[0]


def test_built_in_values():
    text = """kernel void k(device uint* out [[buffer(0)]], uint3 a [[threadgroup_position_in_grid]],
        uint3 b [[threadgroups_per_grid]], uint3 c [[thread_position_in_threadgroup]],
        uint3 d [[threads_per_threadgroup]], uint e [[thread_index_in_threadgroup]],
        ushort f [[thread_index_in_simdgroup]], ushort g [[simdgroup_index_in_threadgroup]],
        uint h [[simdgroups_per_threadgroup]], uint2 i [[threadgroups_per_grid]]) {
      if (a.x == 1 && a.z == 2 && c.x == 5 && c.y == 3 && c.z == 1) {
        uint values[] = {b.x, b.y, b.z, d.x, d.y, d.z, e, f, g, h, i.x, i.y};
        for (int n = 0; n < 12; n++) out[n] = values[n];
      }
    }"""
    buffers = {0: np.zeros(12, np.uint32)}
    done = run_text(text, grid=(2, 1, 3), threadgroup=(8, 4, 2), buffers=buffers, outputs={0})
    index = 5 + 3 * 8 + 1 * 32
    np.testing.assert_array_equal(done.buffers[0], [2, 1, 3, 8, 4, 2, index, index % 32, index // 32, 2, 2, 1])


def test_threadgroup_variables():
    """One declaration may declare several variables. A function may take a threadgroup variable by reference."""
    text = """template <int N> float total(threadgroup float (&shared)[N]) { return shared[0] + shared[N - 1]; }
        kernel void k(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
          threadgroup float memory[2][32], other;
          memory[1][i] = i;
          if (i == 0) other = 100;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          threadgroup float* row = memory[1];
          out[i] = total(memory[1]) + row[31 - i] + other;
        }"""
    np.testing.assert_array_equal(launch(text), 31 + np.arange(32)[::-1] + 100)


def test_vectors():
    """Constructors of vectors convert values instead of copying bits, also through aliases of vector types."""
    text = """typedef short2 Pair;
        kernel void k(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
          float2 a = float2(1.5f, 2), b = vec<float, 2>(3), c = float2(Pair(4, 5));
          out[i] = a.x + 10 * a.y + 100 * b.y + 1000 * c.x + 10000 * static_cast<float2>(Pair(6, 7)).y;
        }"""
    assert (launch(text) == 1.5 + 20 + 300 + 4000 + 70000).all()


@pytest.mark.parametrize(
    "text",
    [
        "kernel void k(device ulong4* a [[buffer(0)]]) {}",
        "kernel void k(device int* a [[buffer(0)]]) { threadgroup long3 x[2]; (void)x; }",
        """template <typename T> [[kernel]] void k(device T* a [[buffer(0)]]) {}
           template [[host_name("k")]] [[kernel]] decltype(k<ulong4>) k<ulong4>;""",
    ],
)
def test_what_cannot_be_checked_is_refused(text):
    with pytest.raises(CompileError, match="neither checked nor counted"):
        compile_text(text)
