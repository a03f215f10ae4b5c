"""Who takes part in a contest, who has his turn when, what is timed, and that all agree."""

from types import SimpleNamespace

import flashattn_core
import numpy as np
import pytest
from flash_evals import contest, machine
from flash_evals.contest import MACHINE, Contest
from flash_evals.implementations import GRADIENTS, RESULTS
from flash_evals.measure import memory_method
from flash_evals.workload import PASSES
from kernel_cases import workload

pytestmark = pytest.mark.usefixtures("quick_machine")


def one_element(factor):
    """The largest one becomes so much larger."""

    def change(array):
        changed = array.copy()
        changed[np.unravel_index(np.abs(changed).argmax(), changed.shape)] *= factor
        return changed

    return change


@pytest.mark.parametrize("wrong", ["by more than the limit", "not a number"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-2)])
@pytest.mark.parametrize(("pass_", "what"), [(pass_, what) for pass_ in PASSES for what in RESULTS[pass_]])
def test_a_wrong_result_is_not_timed(refused, fake_implementation, wrong, dtype, tolerance, pass_, what):
    limit = 2 * tolerance if what in GRADIENTS else tolerance
    fake_implementation("naive", **{what: one_element(float("nan") if wrong == "not a number" else 1 + 1.2 * limit)})
    options = ("--shape", "4/2x8", "--seq-len", 32, "--dtype", dtype, "--impl", "flash,naive", "--pass", pass_)
    line = refused("kernels", *options)
    problem = f"4/2x8, 32 queries, 32 keys, causal, {dtype}" + ("" if pass_ == "forward" else f", {pass_}")
    assert f"naive and flash give different results for {problem}: the {what} differs by" in line
    assert f"expected at most {limit:.0e}" in line


@pytest.mark.parametrize("pass_", PASSES)
def test_rounding_is_no_wrong_result(run_kernels, fake_implementation, pass_):
    """Nor are gradients of query and key that are nothing else, where each query sees one key."""
    fake_implementation("naive", **dict.fromkeys(RESULTS[pass_], lambda result: result * np.float32(1 + 1e-5)))
    for options in ((), ("--window", 1)):
        assert run_kernels("--impl", "flash,naive", "--pass", pass_, *options)


def test_turns(monkeypatch, fake_implementation):
    """Warm-up one by one; then rounds in changing order, the machine's bounds among them: all in every place equally
    often.
    """
    turns = []
    for name in ("flash", "mlx"):
        fake_implementation(name, before=lambda name=name: turns.append(name))
    monkeypatch.setattr(flashattn_core, "peak_flops", lambda: turns.append(MACHINE) or 1.0)
    held = Contest(workload(), "forward", ["flash", "mlx"])
    assert sum(1 for _ in held.hold(6, 0, 0)) == 2 * 6
    assert turns[:4] == ["flash"] * 2 + ["mlx"] * 2  # a tiny call, and the one whose memory is measured
    rounds = [turns[first : first + 3] for first in range(4, 4 + 6 * 3, 3)]
    assert rounds[:3] == [[MACHINE, "flash", "mlx"], ["mlx", "flash", MACHINE], ["flash", "mlx", MACHINE]]
    assert [sorted(place) for place in zip(*rounds, strict=True)] == [sorted(rounds[0] * 2)] * 3
    assert len(held.peak_flops) == len(held.bandwidth) == 6


@pytest.fixture
def clock(monkeypatch):
    """Goes only when somebody lets it."""
    clock = SimpleNamespace(now=0.0)
    clock.go = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(contest, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=lambda seconds: None))
    return clock


@pytest.mark.parametrize(
    ("max_seconds", "trials"),
    [
        (0, 9),  # no limit
        (1, 1),  # one is taken whatever it costs
        (9.5, 2),
    ],
)
def test_who_is_slow_takes_fewer_trials(run_kernels, fake_implementation, clock, max_seconds, trials):
    fake_implementation("flash", before=lambda: clock.go(0.25))
    fake_implementation("mlx", before=lambda: clock.go(4.5))
    entries, _ = run_kernels("--impl", "flash,mlx", "-r", 9, "--max-seconds", max_seconds)
    flash, mlx = (entry["forward"]["trials(s)"] for entry in entries)
    assert mlx == [4.5] * trials
    assert len(flash) == (3 if max_seconds == 1 else 9)


@pytest.mark.parametrize(("kind", "first"), [("cpu", 0.1), ("gpu", 0.5)])
def test_a_trial_lasts_twenty_milliseconds(fake_implementation, clock, monkeypatch, kind, first):
    """Counted when the call is warm: the first one is slow, and on a GPU its kernel may have been compiled."""
    monkeypatch.setattr(contest, "TRIAL_SECONDS", 0.02)
    for name, value in {"kind": kind, "peak_flops": 1.0, "bandwidth": 1.0}.items():
        monkeypatch.setattr(machine, name, lambda *_, value=value: value)
    calls = []

    def before():
        calls.append(None)
        clock.go(first if len(calls) <= 2 else 0.003)

    fake_implementation("flash", before=before)
    held = Contest(workload(), "forward", ["flash"])
    list(held.hold(2, 0, 0))
    assert held.timings["flash"].calls == 8
    assert held.timings["flash"].trials == pytest.approx([0.003] * 2)


def test_what_prepares_a_call_is_not_timed(fake_implementation, clock):
    """But it counts for --max-seconds: that is what somebody waits for."""
    fake_implementation("flash", before=lambda: clock.go(0.25), preparing=lambda: clock.go(4))
    held = Contest(workload(), "backward", ["flash"])
    list(held.hold(9, 13, 0))
    assert held.timings["flash"].trials == [0.25] * 3


def test_memory_is_that_of_one_call(fake_implementation):
    """What a library allocates for good when it is first used is not the call's."""
    kept = []

    def before():
        if not kept:
            kept.append(np.ones(32_000_000, np.uint8))
        np.ones(64_000_000, np.uint8)

    fake_implementation("flash", before=before)
    held = Contest(workload(), "forward", ["flash"])
    next(held.hold(1, 0, 0))
    if "resident" in memory_method():
        assert held.timings["flash"].peak_memory == pytest.approx(64e6, abs=3e6)
