"""Each counter, by kernels whose numbers are known."""

import numpy as np
import pytest
from metal_on_cpu import Counts, Undefined
from small_kernels import OUT, compile_text, run

GROUPS = 3
ALL = 64 * GROUPS
SIMDGROUPS = ALL // 32
WRITE = "out[group * 64 + thread_index] = "
WRITTEN = {"device_written": 4 * ALL}
ARGUMENTS = OUT + ", device const half* in [[buffer(1)]], constant int4& sizes [[buffer(2)]]"
BUFFERS = {0: Undefined(1024, np.float32), 1: np.zeros(448, np.float16), 2: np.zeros(4, np.int32)}

CASES = {
    "": {},
    WRITE + "1;": WRITTEN,
    "if (lane < 5) " + WRITE + "1;": {"device_written": 4 * 5 * SIMDGROUPS},
    "((device half*)out)[group * 64 + thread_index] = 1;": {"device_written": 2 * ALL},
    "((device float4*)out)[group * 64 + thread_index] = float4(1);": {"device_written": 16 * ALL},
    "((device uchar*)out)[group * 64 + thread_index] = 1;": {"device_written": ALL},
    "float sum = 0; for (int i = 0; i < 7; i++) sum += in[i * 64 + thread_index]; " + WRITE + "sum;": {
        "device_read": 7 * 2 * ALL, **WRITTEN
    },
    WRITE + "in[0];": {"device_read": 2 * ALL, **WRITTEN},  # by every lane
    WRITE + "sizes.x;": {"constant_read": 4 * ALL, **WRITTEN},
    "threadgroup half x[64]; x[thread_index] = 1; simdgroup_barrier(mem_flags::mem_threadgroup); "
    + WRITE + "x[thread_index ^ 1];": {
        "threadgroup_written": 2 * ALL, "threadgroup_read": 2 * ALL, "simdgroup_barriers": SIMDGROUPS, **WRITTEN
    },
    "for (int i = 0; i < 5; i++) threadgroup_barrier(mem_flags::mem_none);": {"barriers": 5 * GROUPS},
    "for (int i = 0; i < 5; i++) simdgroup_barrier(mem_flags::mem_none);": {"simdgroup_barriers": 5 * SIMDGROUPS},
    WRITE + "simd_shuffle_xor(1.0f, 1) + simd_shuffle(1.0f, 1);": WRITTEN | {"shuffles": 2 * SIMDGROUPS},
    WRITE + "simd_sum(1.0f) + simd_max(lane) + simd_all(lane);": WRITTEN | {"reductions": 3 * SIMDGROUPS},
    WRITE + "simd_sum(float2(1)).x;": WRITTEN | {"reductions": 2 * SIMDGROUPS},
    WRITE + "fast::exp(float(lane)) * log(lane + 1.0f);": WRITTEN | {"transcendentals": 2 * ALL},
    WRITE + "exp2(float4(lane)).x;": WRITTEN | {"transcendentals": 4 * ALL},
    WRITE + "lane < 3 ? precise::tanh(float(lane)) : 0.0f;": WRITTEN | {"transcendentals": 3 * SIMDGROUPS},
    WRITE + "max(float(lane), 3.0f) + fma(1.0f, lane, 2.0f) + abs(-0.5f);": WRITTEN,
    # A thread's own array, even if it is indexed by what the compiler does not know.
    "float own[8]; for (int i = 0; i < 8; i++) own[i] = i * lane; " + WRITE + "own[lane % 8];": WRITTEN,
    "threadgroup half tile[64]; tile[thread_index] = 1; threadgroup_barrier(mem_flags::mem_threadgroup);"
    "simdgroup_half8x8 m; simdgroup_load(m, tile, 8);"
    + WRITE + "m.thread_elements()[0] + m.thread_elements()[1];": {
        "threadgroup_written": 128 * GROUPS, "threadgroup_read": 128 * SIMDGROUPS, "barriers": GROUPS, **WRITTEN
    },
}  # fmt: skip


@pytest.mark.parametrize("body", CASES)
def test_kernel(body):
    done = run(body, ARGUMENTS, BUFFERS, together=CASES, groups=GROUPS, outputs=())
    assert done.counts == Counts(**CASES[body])


def test_function_constants_do_not_count():
    text = f"""constant int n [[function_constant(0)]];
        kernel void k({OUT}, uint i [[thread_position_in_grid]]) {{ out[i] = n; }}"""
    size = {"grid": (1, 1, 1), "threadgroup": (32, 1, 1)}
    done = compile_text(text).run("k", **size, buffers={0: Undefined(32, np.float32)}, constants={0: 3})
    assert done.counts == Counts(device_written=128)


MATRICES = """simdgroup_matrix<{0}, 8, 8> a = make_filled_simdgroup_matrix<{0}, 8, 8>({0}(1));
    simdgroup_matrix<{1}, 8, 8> b = make_filled_simdgroup_matrix<{1}, 8, 8>({1}(1));
    simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int i = 0; i < 9; i++) simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_multiply(c, a, b);
    simdgroup_store(c, out + (group * 2 + simdgroup) * 64, 8);"""
TYPES = {
    ("float", "float"): "float",
    ("half", "half"): "half",
    ("bfloat", "bfloat"): "bfloat",
    ("float", "half"): "float*half",
    ("half", "float"): "half*float",
}


@pytest.mark.parametrize("types", TYPES, ids=TYPES.get)
def test_matrix_products(types):
    together = [MATRICES.format(*each) for each in TYPES]
    done = run(MATRICES.format(*types), buffers={0: BUFFERS[0]}, together=together, groups=GROUPS)
    assert done.counts == Counts({TYPES[types]: 10 * SIMDGROUPS}, device_written=64 * 4 * SIMDGROUPS)


def test_counts_add_and_scale():
    a, b = Counts({"half": 3, "float": 1}, device_read=10, barriers=1), Counts({"half": 4}, device_read=5, shuffles=2)
    assert a + b == Counts({"float": 1, "half": 7}, device_read=15, barriers=1, shuffles=2)
    assert a * 14 == 14 * a == Counts({"float": 14, "half": 42}, device_read=140, barriers=14)
