"""Threads that do not meet at one barrier, lanes that do not meet at one operation."""

import numpy as np
import pytest
from metal_on_cpu import DivergenceError
from small_kernels import launcher, one_kernel

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

CASES = {
    "a barrier for some lanes": (f"if (lane < 16) {BARRIER}", "threadgroup do not meet"),
    "a barrier for some SIMD groups": (f"if (simdgroup == 0) {BARRIER}", "threadgroup do not meet"),
    "an early return before a barrier": (f"if (simdgroup == 1) return;\n{BARRIER}", "has returned"),
    "two barriers": (f"if (simdgroup == 0) {BARRIER}\nelse\n{BARRIER}", "kernels.metal:3"),
    "a shuffle for some lanes": ("if (lane & 1) out[lane] = simd_shuffle_xor(1.0f, 1);", "simd_shuffle_xor"),
    "a sum after an early return": ("if (lane == 31) return;\nout[lane] = simd_sum(1.0f);", "has returned"),
    "two operations": ("float x = 0; if (lane < 7) x = simd_sum(1.0f);\nelse x = simd_max(2.0f);\nout[0] = x;", "meet"),
    "a barrier and a shuffle": (f"if (lane < 7) {BARRIER}\nelse out[lane] = simd_shuffle(1.0f, 0);", "meet"),
    "a loop of unequal length": ("for (uint i = 0; i < lane; i++) out[lane] = simd_sum(1.0f);", "meet"),
    "a matrix for some lanes": (
        "simdgroup_float8x8 m; if (lane < 8) simdgroup_load(m, out, 8);\nout[thread_index] = m.thread_elements()[0];",
        "simdgroup_load",
    ),
}


@pytest.mark.parametrize("schedule", ["forward", "reverse", "greedy", "random:5"])
@pytest.mark.parametrize("name", CASES)
def test_divergence(name, schedule):
    body, message = CASES[name]
    run = launcher("device float* out [[buffer(0)]]", [each for each, _ in CASES.values()], body)
    buffers = {0: np.zeros(64, np.float32)}
    with pytest.raises(DivergenceError, match=message):
        run(grid=(1, 1, 1), threadgroup=(64, 1, 1), buffers=buffers, schedule=schedule)


def test_a_whole_simd_group_may_leave_early_if_no_barrier_follows():
    body = "if (simdgroup == 1) return;\nout[lane] = simd_sum(1.0f);"
    program = one_kernel("device float* out [[buffer(0)]]", body)
    program.run("k", grid=(1, 1, 1), threadgroup=(64, 1, 1), buffers={0: np.zeros(64, np.float32)})
