"""Times implementations on one pass of a workload.

In each round, each implementation that has time left runs one trial, and the machine's own speed is measured. Before
the first round, each implementation makes a few calls that are not counted. The memory of one of these calls is
measured, and its results are compared with the first implementation's. If they differ, an EvalError ends the contest.
"""

import time
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from flashattn_core.arguments import Precision
from msgspec.structs import replace

from flash_evals.results.errors import EvalError, failing
from flash_evals.results.kernels_result import Settings, Trial
from flash_evals.results.workload import Inputs, Pass, Workload
from flash_evals.work import machine
from flash_evals.work.implementations import IMPLEMENTATIONS, RESULTS
from flash_evals.work.measure import no_garbage_collection, peak_memory

TRIAL_SECONDS = 0.1  # a trial repeats short calls until it takes this long
MOST_CALLS = 8  # of a trial of the backward pass, because all of its calls keep what their forward passes made
MACHINE = "machine"  # in a round's order, stands for the measurement of the machine itself
TINY = 64  # an implementation's first call initialises its library; it has at most this many queries and keys
# A trial waits this long before its calls, until other libraries' threads stop spinning. OpenMP's spin for some ms.
SETTLE_SECONDS = 0.02
# The largest allowed difference of outputs, divided by the largest element. Gradients may differ by twice as much,
# because PyTorch adds the query heads' contributions to a key's gradient in the inputs' dtype.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
TF32_TOLERANCE = 2e-3  # for float32 where MLX multiplies in TF32
# _difference() divides an array's difference by its largest element, or by NEGLIGIBLE times the largest element of all
# results if that is more. This matters if each query sees a single key: then the exact gradients of query and key are
# zero, and the computed ones are only rounding errors.
NEGLIGIBLE = 1e-2


class Entrant:
    def __init__(self, name: str, work: Workload, pass_: Pass, inputs: Inputs, precision: Precision) -> None:
        make = partial(IMPLEMENTATIONS[name], precision=precision)
        tiny = replace(work, query_len=min(TINY, work.query_len), seq_len=min(TINY, work.seq_len))
        contestant = make(tiny, pass_, tiny.inputs(seed=0))
        contestant.compute([contestant.prepare()])
        self.contestant = make(work, pass_, inputs)
        self.spent = 0.0  # seconds of all its trials, and of the calls before them
        self.calls = 1  # the number of calls in one trial

    def warm_up(self) -> list[np.ndarray]:
        """Measures the memory of a call, sets `calls`, and returns the results of one call."""
        mx.synchronize()
        with peak_memory() as peak:
            seconds, results = self.timed()
            self.peak_memory = peak()
        # The first call is up to 10 times slower than the next, and on a GPU it also compiles the kernel. So a second
        # call is timed, except on a CPU if even a call 10 times faster would take TRIAL_SECONDS.
        if seconds < 10 * TRIAL_SECONDS or machine.kind() == "gpu":
            seconds, _ = self.timed()
        most = MOST_CALLS if self.contestant.pass_ == "backward" else float("inf")
        while seconds < TRIAL_SECONDS and self.calls < most:
            self.calls *= 2
            seconds, _ = self.timed()
        return self.contestant.as_numpy(results)

    def timed(self) -> tuple[float, Sequence[Any]]:
        """Runs one trial. Returns its seconds, which do not include prepare(), and the results of one call."""
        began = time.perf_counter()
        is_short = self.calls > 1
        prepared = [self.contestant.prepare() for _ in range(self.calls + is_short)]
        mx.synchronize()
        time.sleep(SETTLE_SECONDS)
        if is_short:  # an uncounted call, because a processor that has waited needs a moment to reach its speed
            self.contestant.compute([prepared.pop()])
        with no_garbage_collection():
            start = time.perf_counter()
            results = self.contestant.compute(prepared)
            end = time.perf_counter()
        self.spent += end - began
        return end - start, results


def hold(work: Workload, pass_: Pass, names: Sequence[str], settings: Settings) -> Generator[Trial | None, None, None]:
    """Yields the trials of all implementations, round by round. None stands for a skipped trial.

    The first round skips nothing. Later, an implementation that has spent `max_seconds` (0: no limit) is skipped.
    Raises EvalError if an implementation fails, or if its results differ from the first implementation's.
    """
    problem = f"{work}" if pass_ == "forward" else f"{work}, {pass_}"
    with failing(f"cannot make inputs for {problem}"):
        inputs = work.inputs(settings.seed)
    entrants: dict[str, Entrant] = {}
    expected: list[np.ndarray] = []  # the first implementation's results
    for name in names:
        with failing(f"{name} cannot compute {problem}"):
            entrants[name] = Entrant(name, work, pass_, inputs, settings.precision)
            results = entrants[name].warm_up()
        expected = expected or results
        if wrong := _difference(work.dtype, pass_, expected, results):
            raise EvalError(f"{name} and {names[0]} give different results for {problem}: {wrong}")
    del inputs, expected, results
    bounds: list[tuple[float, float]] = []
    for number in range(settings.repetitions):
        for turn in order([MACHINE, *names], number):
            if turn == MACHINE:
                bounds.append((machine.peak_flops(work.dtype), machine.bandwidth()))
            elif number and 0 < settings.max_seconds <= entrants[turn].spent:
                yield None
            else:
                entrant = entrants[turn]
                seconds = entrant.timed()[0]  # keeps no results, because they would take memory during the next trial
                yield Trial(work, pass_, turn, entrant.peak_memory, entrant.calls, seconds / entrant.calls, bounds)


def _difference(dtype: str, pass_: Pass, expected: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> str:
    """Describes the first result that differs by more than the tolerance. Returns "" if all results agree."""
    largest = [float(np.abs(array).max()) for array in expected]
    tolerance = TF32_TOLERANCE if dtype == "float32" and machine.tf32() else TOLERANCE[dtype]
    for what, size, one, two in zip(RESULTS[pass_], largest, expected, results, strict=True):
        relative = float(np.abs(one - two).max()) / max(size, NEGLIGIBLE * max(largest))
        limit = tolerance if what == "output" else 2 * tolerance
        if not relative <= limit:  # not `>`, so that NaN does not count as agreement
            return f"the {what} differs by {relative:.1e} of the largest element, expected at most {limit:.0e}"
    return ""


def order(names: Sequence[str], number: int) -> list[str]:
    """Returns the order of round `number`: the names rotated by number // 2, and reversed if `number` is odd."""
    first = number // 2 % len(names)
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if number % 2 else turned
