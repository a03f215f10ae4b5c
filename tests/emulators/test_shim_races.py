"""The emulator reports races in device memory and in threadgroup memory, for accesses of one, two and four bytes.

has_race() in test_shim_races_exactly.py defines what a race is.
"""

import numpy as np
import pytest

from tests.emulators.metal_on_cpu import RaceError, Undefined
from tests.emulators.small_kernels import SCHEDULES, run

RACES = {
    "two lanes write": "out[lane / 2] = lane;",
    "one writes, others read": "out[thread_index + 1] = out[thread_index];",
    "threadgroup memory": """threadgroup float shared[64];
        shared[thread_index] = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_index] = shared[63 - thread_index];
        shared[thread_index] = 2;""",
    "a SIMD-group barrier between SIMD groups": """threadgroup float shared[64];
        shared[thread_index] = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup == 0) shared[lane] = 2;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup == 1) out[lane] = shared[lane];""",
    "half of a float": """device half* halves = (device half*)out;
        out[thread_index] = 1;
        if (thread_index == 63) halves[1] = 1;""",
}

NO_RACES = {
    "each its own": "out[thread_index] = out[thread_index] + 1;",
    "lanes after an operation of their SIMD group": """threadgroup float shared[64];
        shared[thread_index] = lane;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_index] = shared[thread_index ^ 1];""",
    "neighbouring bytes": """device uchar* bytes = (device uchar*)out;
        bytes[thread_index] = thread_index;""",
    "neighbouring halves after floats": """out[thread_index] = 1;
        threadgroup_barrier(mem_flags::mem_device);
        device half* halves = (device half*)out;
        halves[thread_index] = thread_index;""",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", RACES)
def test_race(name, schedule):
    with pytest.raises(RaceError, match="with no barrier in between"):
        run(RACES[name], together=RACES.values(), schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NO_RACES)
def test_no_race(name, schedule):
    run(NO_RACES[name], together=NO_RACES.values(), schedule=schedule)


def test_threadgroup_memory_is_each_threadgroups_own():
    run("threadgroup float x[64]; x[thread_index] = 1; out[group * 64 + thread_index] = x[thread_index];", groups=4)


def test_message_names_both_lines():
    with pytest.raises(RaceError) as caught:
        run("out[thread_index] = 1;\nif (simdgroup == 1)\n  out[lane] = 2;")
    now, past = str(caught.value).splitlines()
    assert now.startswith("buffer 0 (out), byte 0 of 1024: written by thread 32 (simdgroup 1, lane 0)")
    assert "kernels.metal:3" in now
    assert "kernels.metal:1" in past


def test_undefined_output_is_tracked_like_any_other():
    with pytest.raises(RaceError):
        run("out[lane] = 1;", buffers={0: Undefined(64, np.float32)})
