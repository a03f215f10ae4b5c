"""Each counter, by kernels whose numbers are known."""

import numpy as np
import pytest
from metal_on_cpu import Counts, Undefined
from small_kernels import compile_text, launcher

THREADS, GROUPS = 64, 3
ALL = THREADS * GROUPS
SIMDGROUPS = ALL // 32

OUT = "device float* out [[buffer(0)]]"
WRITE = "out[group * 64 + thread_index] = "
WRITTEN = {"device_written": 4 * ALL}


def count(arguments, body, bodies=(), **buffers):
    given = {int(name[1:]): buffer for name, buffer in buffers.items()}
    run = launcher(arguments, [*bodies, body], body)
    size = {"grid": (GROUPS, 1, 1), "threadgroup": (THREADS, 1, 1)}
    return run(**size, buffers={0: Undefined(1024, np.float32)} | given).counts


CASES = [
    ("", {}),
    (WRITE + "1;", WRITTEN),
    ("if (lane < 5) " + WRITE + "1;", {"device_written": 4 * 5 * SIMDGROUPS}),
    ("((device half*)out)[group * 64 + thread_index] = 1;", {"device_written": 2 * ALL}),
    ("((device float4*)out)[group * 64 + thread_index] = float4(1);", {"device_written": 16 * ALL}),
    ("((device uchar*)out)[group * 64 + thread_index] = 1;", {"device_written": ALL}),
    (
        "threadgroup half x[64]; x[thread_index] = 1; simdgroup_barrier(mem_flags::mem_threadgroup); "
        + WRITE
        + "x[thread_index ^ 1];",
        WRITTEN | {"threadgroup_written": 2 * ALL, "threadgroup_read": 2 * ALL, "simdgroup_barriers": SIMDGROUPS},
    ),
    (
        "for (int i = 0; i < 5; i++) threadgroup_barrier(mem_flags::mem_none);",
        {"barriers": 5 * GROUPS},
    ),
    ("for (int i = 0; i < 5; i++) simdgroup_barrier(mem_flags::mem_none);", {"simdgroup_barriers": 5 * SIMDGROUPS}),
    (WRITE + "simd_shuffle_xor(1.0f, 1) + quad_broadcast(1.0f, 1);", WRITTEN | {"shuffles": 2 * SIMDGROUPS}),
    (WRITE + "simd_sum(1.0f) + simd_max(lane) + quad_sum(1);", WRITTEN | {"reductions": 3 * SIMDGROUPS}),
    (WRITE + "simd_sum(float2(1)).x;", WRITTEN | {"reductions": 2 * SIMDGROUPS}),
    (WRITE + "fast::exp(float(lane)) * rsqrt(lane + 1.0f);", WRITTEN | {"transcendentals": 2 * ALL}),
    (WRITE + "exp2(float4(lane)).x;", WRITTEN | {"transcendentals": 4 * ALL}),
    (WRITE + "lane < 3 ? precise::tanh(float(lane)) : 0.0f;", WRITTEN | {"transcendentals": 3 * SIMDGROUPS}),
    (WRITE + "max(float(lane), 3.0f) + fma(1.0f, lane, 2.0f) + abs(floor(0.5f));", WRITTEN),
    # A thread's own array, even if it is indexed by what the compiler does not know.
    ("float own[8]; for (int i = 0; i < 8; i++) own[i] = i * lane; " + WRITE + "own[lane % 8];", WRITTEN),
]


@pytest.mark.parametrize(("body", "expected"), CASES)
def test_kernel(body, expected):
    assert count(OUT, body, [each for each, _ in CASES]) == Counts(**expected)


def test_device_read():
    arguments = OUT + ", device const half* in [[buffer(1)]]"
    body = "float sum = 0; for (int i = 0; i < 7; i++) sum += in[i * 64 + thread_index]; " + WRITE + "sum;"
    assert count(arguments, body, b1=np.zeros(448, np.float16)) == Counts(device_read=7 * 2 * ALL, **WRITTEN)


def test_every_lane_that_reads_the_same_counts():
    arguments = OUT + ", device const float* in [[buffer(1)]]"
    assert count(arguments, WRITE + "in[0];", b1=np.zeros(1, np.float32)).device_read == 4 * ALL


def test_constant_read():
    arguments = OUT + ", constant int4& sizes [[buffer(1)]]"
    body = WRITE + "sizes.x + sizes.w;"
    assert count(arguments, body, b1=np.zeros(4, np.int32)).constant_read in (8 * ALL, 16 * ALL)


def test_atomics_are_read_and_written():
    body = "atomic_fetch_add_explicit((device atomic_uint*)out, 1u, memory_order_relaxed);"
    assert count(OUT, body, b0=np.zeros(4, np.uint32)) == Counts(device_read=4 * ALL, device_written=4 * ALL)


def test_function_constants_do_not_count():
    text = f"""constant int n [[function_constant(0)]];
        kernel void k({OUT}, uint i [[thread_position_in_grid]]) {{ out[i] = n; }}"""
    done = compile_text(text).run(
        "k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={0: Undefined(32, np.float32)}, constants={0: 3}
    )
    assert done.counts == Counts(device_written=128)


MATRICES = """simdgroup_matrix<{a}, 8, 8> a = make_filled_simdgroup_matrix<{a}, 8, 8>({a}(1));
    simdgroup_matrix<{b}, 8, 8> b = make_filled_simdgroup_matrix<{b}, 8, 8>({b}(1));
    simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int i = 0; i < 9; i++) simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_multiply(c, a, b);
    simdgroup_store(c, out + (group * 2 + simdgroup) * 64, 8);"""


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        ("float", "float", "float"),
        ("half", "half", "half"),
        ("bfloat", "bfloat", "bfloat"),
        ("float", "half", "float*half"),
        ("half", "float", "half*float"),
    ],
)
def test_matrix_products(a, b, name):
    counts = count(OUT, MATRICES.format(a=a, b=b))
    assert counts == Counts({name: 10 * SIMDGROUPS}, device_written=64 * 4 * SIMDGROUPS)


def test_matrix_loads():
    body = """threadgroup half tile[64];
        if (simdgroup == 0) { tile[lane] = 1; tile[lane + 32] = 1; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_half8x8 m; simdgroup_load(m, tile, 8);
        out[group * 64 + thread_index] = m.thread_elements()[0] + m.thread_elements()[1];"""
    expected = Counts(threadgroup_written=128 * GROUPS, threadgroup_read=128 * SIMDGROUPS, barriers=GROUPS, **WRITTEN)
    assert count(OUT, body) == expected


def test_counts_add_and_scale():
    a, b = Counts({"half": 3, "float": 1}, device_read=10, barriers=1), Counts({"half": 4}, device_read=5, shuffles=2)
    assert a + b == Counts({"float": 1, "half": 7}, device_read=15, barriers=1, shuffles=2)
    assert a * 14 == 14 * a == Counts({"float": 14, "half": 42}, device_read=140, barriers=14)
