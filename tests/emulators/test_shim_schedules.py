"""A schedule fixes the order in which the emulator runs threads between barriers.

Each test provokes a race. The error message shows the order, because it names the thread that wrote second.
"""

import pytest

from tests.emulators.metal_on_cpu import Program, RaceError
from tests.emulators.small_kernels import run

SCHEDULES = ["forward", "reverse", "random:1", "random:2"]
THREADS, THREADGROUPS = ("out[0] = 1;", 1), ("if (thread_index == 0) out[0] = 1;", 40)
TWICE = "if (thread_index == 32) out[0] = 1; simdgroup_barrier(mem_flags::mem_none); if (thread_index == 0) out[0] = 2;"


def second(schedule, body, groups=1):
    """The race's message, which names the thread that wrote second."""
    with pytest.raises(RaceError) as caught:
        run(body, groups=groups, threads=128, schedule=schedule)
    return str(caught.value).partition(" at ")[0]


@pytest.mark.parametrize(
    ("schedule", "kernel", "who"),
    [
        ("forward", THREADS, "by thread 1 "),
        ("reverse", THREADS, "by thread 126 "),
        ("forward", THREADGROUPS, "of threadgroup (1, 0, 0)"),
        ("reverse", THREADGROUPS, "of threadgroup (38, 0, 0)"),
        ("forward", (TWICE, 1), "by thread 0 "),
        ("greedy", (TWICE, 1), "by thread 32 "),  # SIMD group 0 runs to its end before SIMD group 1 begins
    ],
)
def test_who_comes_second(schedule, kernel, who):
    assert who in second(schedule, *kernel)


@pytest.mark.parametrize("kernel", [THREADS, THREADGROUPS])
def test_each_is_another_order_and_always_the_same(kernel, monkeypatch):
    monkeypatch.setattr(Program, "remembers", False)
    orders = [second(schedule, *kernel) for schedule in SCHEDULES]
    assert len(set(orders)) == len(SCHEDULES)
    assert [second(schedule, *kernel) for schedule in SCHEDULES] == orders


@pytest.mark.parametrize("schedule", ["sideways", "random", "forward:3"])
def test_unknown(schedule):
    with pytest.raises(ValueError, match="no schedule"):
        run("out[thread_index] = 1;", schedule=schedule)
