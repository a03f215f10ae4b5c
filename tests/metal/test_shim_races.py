"""Races: two threads, the same bytes, a write, and no barrier in between. In every schedule."""

import numpy as np
import pytest
from metal_on_cpu import RaceError, Undefined
from small_kernels import SCHEDULES, run

RACES = {
    "two SIMD groups write": "out[lane] = thread_index;",
    "two lanes write": "out[lane / 2] = lane;",
    "all write the same": "out[0] = 1;",
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
    "a barrier that orders other memory": """out[thread_index] = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_index + 64] = out[63 - thread_index];""",
    "half of a float": """device half* halves = (device half*)out;
        out[thread_index] = 1;
        if (thread_index == 63) halves[1] = 1;""",
    "matrices that overlap by a row": """simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_store(m, out + simdgroup * 56, 8);""",
}

NO_RACES = {
    "each its own": "out[thread_index] = out[thread_index] + 1;",
    "a barrier in between": """out[thread_index] = thread_index;
        threadgroup_barrier(mem_flags::mem_device);
        out[thread_index + 64] = out[63 - thread_index];""",
    "lanes after an operation of their SIMD group": """threadgroup float shared[64];
        shared[thread_index] = lane;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_index] = shared[thread_index ^ 1];""",
    "all read": "out[thread_index + 64] = out[0];",
    "neighbouring bytes": """device uchar* bytes = (device uchar*)out;
        bytes[thread_index] = thread_index;""",
    "neighbouring halves after floats": """out[thread_index] = 1;
        threadgroup_barrier(mem_flags::mem_device);
        device half* halves = (device half*)out;
        halves[thread_index] = thread_index;""",
    "matrices side by side": """simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_store(m, out + simdgroup * 8, 16);""",
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


BETWEEN_THREADGROUPS = [
    "if (thread_index == 0) out[0] = group;",
    "if (group == 0) out[thread_index] = 1; else if (thread_index == 0) out[100] = out[5];",
    # Read before the barrier by all; the second threadgroup writes what only the first one has read after it.
    """float seen = out[thread_index];
    threadgroup_barrier(mem_flags::mem_device);
    if (group == 1 && thread_index == 0) out[70] = seen;
    if (group == 0) out[128 + thread_index] = out[70] + seen;""",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("body", BETWEEN_THREADGROUPS)
def test_barriers_do_not_order_threadgroups(body, schedule):
    with pytest.raises(RaceError, match="another threadgroup"):
        run(body, together=BETWEEN_THREADGROUPS, groups=2, schedule=schedule)


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
