"""Under every schedule, the emulator reports a race in a random program if and only if has_race() finds one.

In each step, a thread reads a memory cell, writes a memory cell or does nothing. All threads pass the same barriers and
SIMD-group operations. has_race() compares all pairs of accesses. The emulator remembers few accesses to each cell.
"""

from itertools import combinations

import numpy as np
import pytest

from tests.emulators.metal_on_cpu import RaceError
from tests.emulators.small_kernels import SCHEDULES, run

GROUPS, THREADS, STEPS, CELLS = 2, 96, 6, 16
NOTHING, READ, WRITE = 0, 1, 2

KERNEL = """for (int step = 0; step < 6; step++) {
    int action = actions[(group * 96 + thread_index) * 6 + step];
    device float* cell = cells + action / 4;
    if (action % 4 == 1) sink[group * 96 + thread_index] = *cell;
    if (action % 4 == 2) *cell = step;
    if (between[step] == 1) simdgroup_barrier(mem_flags::mem_device);
    if (between[step] == 2) threadgroup_barrier(mem_flags::mem_device);
    if (between[step] == 3) threadgroup_barrier(mem_flags::mem_threadgroup);
  }"""
ARGUMENTS = """device const int* actions [[buffer(0)]], device const int* between [[buffer(1)]],
    device float* cells [[buffer(2)]], device float* sink [[buffer(3)]]"""


def draw(seed):
    """A random program, with so few accesses that about half of the programs are free of races."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice([NOTHING, READ, WRITE], (GROUPS, THREADS, STEPS), p=[0.991, 0.006, 0.003])
    return kinds, rng.integers(0, CELLS, kinds.shape), rng.integers(0, 4, STEPS)


def has_race(kinds, cells, between):
    # All accesses are to device memory, so a barrier for threadgroup memory (code 3) orders none of them.
    epoch = np.concatenate([[0], np.cumsum(between == 2)])
    accesses = [
        (group, thread, step, kinds[group, thread, step], cells[group, thread, step])
        for group, thread, step in np.argwhere(kinds)
    ]

    def race(one, other):
        (group, thread, step, kind, cell), (group_, thread_, step_, kind_, cell_) = one, other
        if cell != cell_ or WRITE not in (kind, kind_) or (group, thread) == (group_, thread_):
            return False
        if group != group_:
            return True
        if epoch[step] != epoch[step_]:
            return False
        operations = np.sum(between[min(step, step_) : max(step, step_)] == 1)
        return thread // 32 != thread_ // 32 or operations == 0

    return any(race(*pair) for pair in combinations(accesses, 2))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_random_programs(schedule):
    found = []
    for seed in range(50):
        kinds, cells, between = draw(seed)
        buffers = {0: (kinds + 4 * cells).astype(np.int32), 1: between.astype(np.int32)}
        buffers |= {2: np.zeros(CELLS, np.float32), 3: np.zeros(GROUPS * THREADS, np.float32)}
        try:
            run(KERNEL, ARGUMENTS, buffers, groups=GROUPS, threads=THREADS, outputs=(), schedule=schedule)
            found.append(False)
        except RaceError:
            found.append(True)
        assert found[-1] == has_race(kinds, cells, between), seed
    assert 10 < sum(found) < 40
