"""What Metal's language has and C++ has not."""

import numpy as np
import pytest
from metal_on_cpu import CompileError, Program, RaceError
from small_kernels import compile_text

F = np.zeros(32, np.float32)


def launch(text, kernel="k", buffers=None, **options):
    size = {"grid": (1, 1, 1), "threadgroup": (32, 1, 1)}
    return compile_text(text).run(kernel, **size, buffers=buffers or {0: F}, outputs={0}, **options).buffers[0]


@pytest.mark.parametrize(
    "keyword", ["kernel void", "[[kernel]] void", "[[kernel, max_total_threads_per_threadgroup(64)]] void"]
)
def test_ways_to_declare_a_kernel(keyword):
    arguments = "device float* out [[buffer(0)]], ushort2 at [[thread_position_in_threadgroup]]"
    np.testing.assert_array_equal(launch(f"{keyword} k({arguments}) {{ out[at.x] = at.x; }}"), np.arange(32))


def test_built_in_values():
    text = """kernel void k(device uint* out [[buffer(0)]], uint3 a [[threadgroup_position_in_grid]],
        uint3 b [[threadgroups_per_grid]], uint3 c [[thread_position_in_grid]],
        uint3 d [[thread_position_in_threadgroup]], uint3 e [[threads_per_threadgroup]],
        uint3 f [[threads_per_grid]], uint g [[thread_index_in_threadgroup]],
        ushort h [[thread_index_in_simdgroup]], ushort i [[simdgroup_index_in_threadgroup]],
        uint j [[simdgroups_per_threadgroup]], uint k [[threads_per_simdgroup]], uint2 l [[thread_position_in_grid]]) {
      if (a.x == 1 && a.z == 2 && d.x == 5 && d.y == 3 && d.z == 1) {
        uint values[] = {b.x, b.y, b.z, c.x, c.y, c.z, e.x, e.y, e.z, f.x, f.y, f.z, g, h, i, j, k, l.x, l.y};
        for (int n = 0; n < 19; n++) out[n] = values[n];
      }
    }"""
    buffers = {0: np.zeros(19, np.uint32)}
    done = compile_text(text).run("k", grid=(2, 1, 3), threadgroup=(8, 4, 2), buffers=buffers, outputs={0})
    index = 5 + 3 * 8 + 1 * 32
    expected = [2, 1, 3, 8 + 5, 3, 4 + 1, 8, 4, 2, 16, 4, 6, index, index % 32, index // 32, 2, 32, 13, 3]
    np.testing.assert_array_equal(done.buffers[0], expected)


def test_function_constants():
    text = """constant int count [[function_constant(0)]];
        constant float factor [[function_constant(1)]];
        constant bool flag [[function_constant(2)]];
        constant uint unset [[function_constant(3)]];
        constant int derived = count * 2 + (is_function_constant_defined(unset) ? 100 : 0);
        kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
          out[i] = derived * factor + (flag ? 1000 : 0) + (is_function_constant_defined(flag) ? 5000 : 0) + unset;
        }"""
    assert (launch(text, constants={0: 7, 1: 0.5, 2: True}) == 7 + 1000 + 5000).all()
    assert (launch(text, constants={0: 7, 1: 0.5, 3: 1}) == 57 + 1).all()
    types = [("count", "int"), ("factor", "float"), ("flag", "bool"), ("unset", "uint")]
    assert compile_text(text).constants == dict(enumerate(types))


def test_templates_and_host_names():
    text = """template <typename T, int N> [[kernel]] void fill(device T* out [[buffer(0)]],
                                                            uint i [[thread_position_in_grid]]) { out[i] = N; }
        template [[host_name("fill_half_" "3")]] [[kernel]] decltype(fill<half, 3>) fill<half, 3>;
        template [[host_name("fill_float_4")]] kernel void fill<float, 4>(device float* out [[buffer(0)]],
                                                                         uint i [[thread_position_in_grid]]);"""
    assert set(compile_text(text).kernels) == {"fill_half_3", "fill_float_4"}
    assert (launch(text, "fill_half_3", {0: F.astype(np.float16)}) == 3).all()
    assert (launch(text, "fill_float_4") == 4).all()


def test_pointers_in_classes_and_templates():
    text = """template <typename T> struct Tile {
          threadgroup T* to; const device T* from; int stride;
          Tile(threadgroup T* to_, const device T* from_, int stride_) : to(to_), from(from_), stride(stride_) {}
          void load(int i) thread { to[i] = from[i * stride]; }
          T operator[](int i) const thread { return to[i]; }
        };
        template <typename Pointer> float first(Pointer p) { return p[0]; }
        METAL_FUNC void swap(thread float& a, thread float& b) { float c = a; a = b; b = c; }
        kernel void k(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
          threadgroup float memory[2][16], other;
          Tile<float> tile(&memory[0][0], in, 2);
          tile.load(i);
          if (i == 0) other = 100;
          threadgroup_barrier(mem_flags::mem_threadgroup);
          float a = tile[31 - i], b = 0;
          swap(a, b);
          threadgroup float* row = memory[1];
          #pragma unroll
          for (short n = 0; n < 3; n++) b += other;
          out[i] = b + first(row) + first(in);
        }"""
    source = np.arange(64, dtype=np.float32) + 1
    np.testing.assert_array_equal(launch(text, buffers={0: F, 1: source}), source[62::-2] + 300 + 33 + 1)


def test_references_to_arrays():
    text = """template <int N> float total(const thread float4 (&rows)[N], threadgroup float (&shared)[32]) {
          float sum = shared[0]; for (int i = 0; i < N; i++) sum += rows[i].x; return sum; }
        struct Types { typedef float4 Row; static Row make(float x) { return Row(x, 0, 0, 0); } };
        kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
          threadgroup float shared[32];
          shared[i] = 5;
          simdgroup_barrier(mem_flags::mem_threadgroup);
          float4 rows[2] = {float4(1), Types::make(i)};
          const device float4* p = (const device float4*)out;
          out[i] = total(rows, shared) + float4(*p).y * 0;
        }"""
    with pytest.raises(RaceError, match="buffer 0"):  # all read the beginning of what they write
        launch(text)
    np.testing.assert_array_equal(launch(text.replace("float4(*p).y * 0", "0")), np.arange(32) + 6)


def test_constants_in_program_scope():
    text = """constant float table[4] = {1, 2, 3, 4};
        constexpr constant int two = 2;
        struct Scaled { float values[4]; int2 size; };
        kernel void k(device float* out [[buffer(0)]], constant Scaled& s [[buffer(1)]], constant int* n [[buffer(2)]],
                      uint i [[thread_position_in_grid]]) {
          out[i] = table[i % 4] * two + s.values[3] + s.size.y + n[1];
        }"""
    scaled = np.zeros(24, np.uint8)
    scaled[12:16].view(np.float32)[0] = 0.5
    scaled[20:24].view(np.int32)[0] = 40
    out = launch(text, buffers={0: F, 1: scaled.tobytes(), 2: np.array([0, 200], np.int32)})
    np.testing.assert_array_equal(out, np.tile([242.5, 244.5, 246.5, 248.5], 8))


def test_defines_and_includes(tmp_path):
    (tmp_path / "mine.h").write_text("#define VALUE (BASE + 1)\n")
    text = """#include <metal_stdlib>
        #include "mine.h"
        kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = VALUE; }"""
    program = Program(text, include_dirs=[tmp_path], defines=["BASE=4"])
    done = program.run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={0: F}, outputs={0})
    assert done.buffers[0][0] == 5


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
