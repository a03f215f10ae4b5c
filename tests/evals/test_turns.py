"""`flash-eval kernels` compares the results of implementations, and times them in turns."""

from types import SimpleNamespace

import flashattn_core
import numpy as np
import pytest
from flash_evals.results.workload import PASSES, Workload
from flash_evals.work import contest, machine
from flash_evals.work.implementations import RESULTS

pytestmark = pytest.mark.usefixtures("quick_machine")


def one_element(factor):
    """A function that multiplies an array's largest element by `factor`."""

    def change(array):
        changed = array.copy()
        changed[np.unravel_index(np.abs(changed).argmax(), changed.shape)] *= factor
        return changed

    return change


@pytest.mark.parametrize("wrong", ["by more than the limit", "not a number"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-2)])
@pytest.mark.parametrize(("pass_", "what"), [(pass_, what) for pass_ in PASSES for what in RESULTS[pass_]])
def test_a_wrong_result_is_not_timed(refused, fake_implementation, wrong, dtype, tolerance, pass_, what):
    limit = tolerance if what == "output" else 2 * tolerance
    fake_implementation("naive", **{what: one_element(float("nan") if wrong == "not a number" else 1 + 1.2 * limit)})
    options = ("--shape", "4/2x8", "--seq-len", 32, "--dtype", dtype, "--impl", "flash,naive", "--pass", pass_)
    line = refused("kernels", *options)
    problem = f"4/2x8, 32 queries, 32 keys, causal, {dtype}" + ("" if pass_ == "forward" else f", {pass_}")
    assert f"naive and flash give different results for {problem}: the {what} differs by" in line
    assert f"expected at most {limit:.0e}" in line


@pytest.mark.parametrize("pass_", PASSES)
def test_rounding_is_no_wrong_result(run_kernels, fake_implementation, pass_):
    """Rounding errors are accepted. If each query sees one key, the gradients of query and key are rounding errors."""
    run_kernels("--impl", "flash,mlx", "--pass", pass_, "--window", 1)
    fake_implementation("naive", **dict.fromkeys(RESULTS[pass_], lambda result: result * np.float32(1 + 1e-5)))
    run_kernels("--impl", "flash,naive", "--pass", pass_)


def test_turns(run_kernels, fake_implementation, monkeypatch):
    """Implementations warm up one by one. Then each round times flash, mlx and the machine's peak speed. In six
    rounds, each of the three comes first, second and third twice.
    """
    turns = []
    for name in ("flash", "mlx"):
        fake_implementation(name, before=lambda name=name: turns.append(name))
    monkeypatch.setattr(flashattn_core, "peak_flops", lambda: turns.append("machine") or 1e12 * turns.count("machine"))
    entries, _ = run_kernels("--impl", "flash,mlx", "-r", 6)
    assert turns[:4] == ["flash"] * 2 + ["mlx"] * 2  # a tiny call, and a call whose memory is measured
    rounds = [turns[first : first + 3] for first in range(4, 4 + 6 * 3, 3)]
    assert rounds[:3] == [["machine", "flash", "mlx"], ["mlx", "flash", "machine"], ["flash", "mlx", "machine"]]
    assert [sorted(place) for place in zip(*rounds, strict=True)] == [sorted(rounds[0] * 2)] * 3
    assert [entry["roofline"]["peak(TFLOPs/s)"] for entry in entries] == [3.5, 3.5]  # the median of the rounds


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only by clock.go(seconds)."""
    clock = SimpleNamespace(now=0.0)
    clock.go = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(contest, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=lambda seconds: None))
    return clock


# With max_seconds=0 there is no limit. With max_seconds=1, mlx has one trial, because the first trial always runs. With
# max_seconds=9.5, mlx has two trials.
@pytest.mark.parametrize(("max_seconds", "of_flash", "of_mlx"), [(0, 9, 9), (1, 3, 1), (9.5, 9, 2)])
def test_who_is_slow_takes_fewer_trials(fake_implementation, clock, max_seconds, of_flash, of_mlx):
    """The time to prepare a call is not part of a trial's time. It counts towards max_seconds, because the user waits
    for it. hold() yields None for each trial that is left out, so that the progress bar advances.
    """
    fake_implementation("flash", before=lambda: clock.go(0.25))
    fake_implementation("mlx", before=lambda: clock.go(0.5), preparing=lambda: clock.go(4))
    work = Workload(1, 32, 32, 4, 2, 8, True, None, "float32", None)
    settings = contest.Settings(9, max_seconds, seed=0, memory="", interrupted=False)
    held = list(contest.hold(work, "backward", ["flash", "mlx"], settings))
    assert len(held) == 2 * 9
    trials = sorted((trial.impl, trial.seconds) for trial in held if trial)
    assert trials == [("flash", 0.25)] * of_flash + [("mlx", 0.5)] * of_mlx


@pytest.mark.parametrize(("kind", "first"), [("cpu", 0.1), ("gpu", 0.5)])
def test_a_trial_lasts_twenty_milliseconds(run_kernels, fake_implementation, clock, monkeypatch, kind, first):
    """The first call may compile a kernel. So the time of a later call decides how many calls a trial has."""
    monkeypatch.setattr(contest, "TRIAL_SECONDS", 0.02)
    for name, value in {"kind": kind, "peak_flops": 1.0, "bandwidth": 1.0}.items():
        monkeypatch.setattr(machine, name, lambda *_, value=value: value)
    durations = iter([first, first])
    fake_implementation("flash", before=lambda: clock.go(next(durations, 0.003)))
    [entry], _ = run_kernels("--impl", "flash", "-r", 2)
    assert entry["forward"]["calls_per_trial"] == 8
    assert entry["forward"]["trials(s)"] == pytest.approx([0.003] * 2)
