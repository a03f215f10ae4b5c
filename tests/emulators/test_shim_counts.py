"""Each counter is exact for kernels whose operations and bytes are known."""

import numpy as np
import pytest

from tests.emulators.metal_on_cpu import Counts, Undefined
from tests.emulators.small_kernels import OUT, run

GROUPS = 3
ALL = 64 * GROUPS
SIMDGROUPS = ALL // 32
WRITE = "out[group * 64 + thread_index] = "
WRITTEN = {"device_written": 4 * ALL}
ARGUMENTS = OUT + ", device const half* in [[buffer(1)]], constant int& size [[buffer(2)]]"
BUFFERS = {0: Undefined(1024, np.float32), 1: np.zeros(448, np.float16), 2: np.int32(0)}

CASES = {
    "": {},
    WRITE + "size;": WRITTEN,
    "if (lane < 5) " + WRITE + "1;": {"device_written": 4 * 5 * SIMDGROUPS},
    "((device half*)out)[group * 64 + thread_index] = 1;": {"device_written": 2 * ALL},
    "((device float4*)out)[group * 64 + thread_index] = float4(1);": {"device_written": 16 * ALL},
    "((device uchar*)out)[group * 64 + thread_index] = 1;": {"device_written": ALL},
    "float sum = 0; for (int i = 0; i < 7; i++) sum += in[i * 64 + thread_index]; " + WRITE + "sum;": {
        "device_read": 7 * 2 * ALL, **WRITTEN
    },
    WRITE + "in[0];": {"device_read": 2 * ALL, **WRITTEN},  # every lane's read counts
    "threadgroup half x[64]; x[thread_index] = 1; simdgroup_barrier(mem_flags::mem_threadgroup); "
    + WRITE + "x[thread_index ^ 1];": {"threadgroup_written": 2 * ALL, "threadgroup_read": 2 * ALL, **WRITTEN},
    "for (int i = 0; i < 5; i++) threadgroup_barrier(mem_flags::mem_none);": {"barriers": 5 * GROUPS},
    WRITE + "simd_shuffle_xor(1.0f, 1) + simd_shuffle(1.0f, 1);": WRITTEN | {"shuffles": 2 * SIMDGROUPS},
    WRITE + "simd_sum(1.0f) + simd_max(lane) + simd_all(lane);": WRITTEN | {"reductions": 3 * SIMDGROUPS},
    WRITE + "fast::exp(float(lane)) * log2(lane + 1.0f);": WRITTEN | {"transcendentals": 2 * ALL},
    WRITE + "lane < 3 ? precise::tanh(float(lane)) : 0.0f;": WRITTEN | {"transcendentals": 3 * SIMDGROUPS},
    WRITE + "max(float(lane), 3.0f) + fma(1.0f, lane, 2.0f);": WRITTEN,
    # A thread's own array does not count, even with an index that the compiler does not know.
    "float own[8]; for (int i = 0; i < 8; i++) own[i] = i * lane; " + WRITE + "own[lane % 8];": WRITTEN,
    "simdgroup_float8x8 a; a.thread_elements() = 1;"
    "for (int i = 0; i < 9; i++) simdgroup_multiply_accumulate(a, a, a, a);"
    + WRITE + "a.thread_elements().x;": {"mma": 9 * SIMDGROUPS, **WRITTEN},
}  # fmt: skip


@pytest.mark.parametrize("body", CASES)
def test_kernel(body):
    assert run(body, ARGUMENTS, BUFFERS, together=CASES, groups=GROUPS, outputs=()).counts == Counts(**CASES[body])


def test_counts_add():
    a, b = Counts(mma=3, device_read=10, barriers=1), Counts(mma=4, device_read=5, shuffles=2)
    assert a + b == Counts(mma=7, device_read=15, barriers=1, shuffles=2)
