"""Who goes first between two barriers: four schedules, each always the same. A race's message says who came second."""

import pytest
from metal_on_cpu import Program, RaceError
from small_kernels import run

SCHEDULES = ["forward", "reverse", "greedy", "random:1", "random:2"]


def second(schedule, body, groups=1):
    """The message, which says who wrote what another had written before."""
    with pytest.raises(RaceError) as caught:
        run(body, groups=groups, threads=128, schedule=schedule)
    return str(caught.value).partition(" at ")[0]


@pytest.mark.parametrize(
    ("body", "groups", "forward", "reverse"),
    [
        ("out[0] = 1;", 1, "by thread 1 ", "by thread 126 "),
        ("if (thread_index == 0) out[0] = 1;", 40, "of threadgroup (1, 0, 0)", "of threadgroup (38, 0, 0)"),
    ],
    ids=["threads", "threadgroups"],
)
def test_each_has_an_order_of_its_own(body, groups, forward, reverse):
    assert forward in second("forward", body, groups)
    assert reverse in second("reverse", body, groups)
    assert len({second(schedule, body, groups) for schedule in SCHEDULES if schedule != "greedy"}) == 4


def test_greedy_lets_a_simd_group_run_to_the_barrier():
    body = (
        "if (thread_index == 32) out[0] = 1; simdgroup_barrier(mem_flags::mem_none); if (thread_index == 0) out[0] = 2;"
    )
    assert "by thread 0 " in second("forward", body)
    assert "by thread 32 " in second("greedy", body)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_is_deterministic(schedule, monkeypatch):
    monkeypatch.setattr(Program, "remembers", False)
    assert second(schedule, "out[0] = 1;") == second(schedule, "out[0] = 1;")


@pytest.mark.parametrize("schedule", ["sideways", "random", "forward:3"])
def test_unknown(schedule):
    with pytest.raises(ValueError, match="no schedule"):
        run("out[thread_index] = 1;", schedule=schedule)
