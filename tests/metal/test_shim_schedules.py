"""Who goes first between two barriers: four schedules, each always the same."""

import numpy as np
import pytest
from small_kernels import one_kernel

SCHEDULES = ["forward", "reverse", "greedy", "random:1", "random:2"]

# Atomics are free of races, but not of order: each thread draws a number.
TICKETS = """tickets[group * 64 + thread_index] = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_none);
    tickets[128 + group * 64 + thread_index] = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);"""
ARGUMENTS = "device atomic_uint* counter [[buffer(0)]], device uint* tickets [[buffer(1)]]"


def tickets(schedule, body=TICKETS):
    buffers = {0: np.zeros(1, np.uint32), 1: np.zeros(256, np.uint32)}
    program = one_kernel(ARGUMENTS, body)
    done = program.run("k", grid=(2, 1, 1), threadgroup=(64, 1, 1), buffers=buffers, outputs={0, 1}, schedule=schedule)
    assert done.buffers[0] == 256
    return done.buffers[1]


def test_each_is_different():
    assert len({tickets(schedule).tobytes() for schedule in SCHEDULES if schedule != "greedy"}) == 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_is_deterministic(schedule):
    np.testing.assert_array_equal(tickets(schedule), tickets(schedule))


def test_forward():
    expected = [*range(64), *range(128, 192), *range(64, 128), *range(192, 256)]
    np.testing.assert_array_equal(tickets("forward"), expected)


def test_reverse():
    np.testing.assert_array_equal(tickets("reverse"), 255 - tickets("forward").reshape(2, -1)[::-1].reshape(-1))


def test_random_is_a_permutation_within_each_round():
    drawn = tickets("random:1").reshape(2, 2, 64)
    for half in drawn.reshape(4, 64):
        assert half.max() - half.min() == 63
    assert (drawn[0].max(axis=1) < drawn[1].min(axis=1)).all()


def test_greedy_lets_a_simd_group_run_to_the_barrier():
    body = """uint first = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
        simdgroup_barrier(mem_flags::mem_none);
        uint second = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
        tickets[group * 64 + thread_index] = second - first;"""
    assert (tickets("greedy", body)[:128] == 32).all()
    assert (tickets("forward", body)[:128] == 64).all()


@pytest.mark.parametrize("schedule", ["sideways", "random", "forward:3"])
def test_unknown(schedule):
    with pytest.raises(ValueError, match="no schedule"):
        tickets(schedule)
