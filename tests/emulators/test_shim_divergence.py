"""It is an error if threads do not meet at one barrier, or lanes do not meet at one operation."""

import pytest

from tests.emulators.metal_on_cpu import DivergenceError
from tests.emulators.small_kernels import SCHEDULES, run

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
CASES = {
    f"if (lane < 16) {BARRIER}": "threadgroup do not meet",
    f"if (simdgroup == 0) {BARRIER}": "threadgroup do not meet",
    f"if (simdgroup == 1) return;\n{BARRIER}": "has returned",
    f"if (simdgroup == 0) {BARRIER}\nelse\n{BARRIER}": "kernels.metal:3",  # two barriers
    "if (lane & 1) out[lane] = simd_shuffle_xor(1.0f, 1);": "simd_shuffle_xor",
    "if (lane == 31) return;\nout[lane] = simd_sum(1.0f);": "has returned",
    "float x = 0; if (lane < 7) x = simd_sum(1.0f);\nelse x = simd_max(2.0f);\nout[0] = x;": "meet",
    f"if (lane < 7) {BARRIER}\nelse out[lane] = simd_shuffle(1.0f, 0);": "meet",
    "for (uint i = 0; i < lane; i++) out[lane] = simd_sum(1.0f);": "meet",
    "simdgroup_float8x8 m;\nif (lane < 8) simdgroup_multiply_accumulate(m, m, m, m);": "simdgroup_multiply_accumulate",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("body", CASES)
def test_divergence(body, schedule):
    with pytest.raises(DivergenceError, match=CASES[body]):
        run(body, together=CASES, schedule=schedule)


def test_a_whole_simd_group_may_leave_early_if_no_barrier_follows():
    run("if (simdgroup == 1) return;\nout[lane] = simd_sum(1.0f);")
