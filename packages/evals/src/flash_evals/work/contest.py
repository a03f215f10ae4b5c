"""Implementations against each other on one pass of a workload, in turns, beside the bounds of the machine.

Before the first turn each implementation makes a few calls that are not counted. One of them tells how much memory a
call needs, and its results are compared: how long a wrong result takes is of no interest.
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

TRIAL_SECONDS = 0.02  # short calls are repeated until a trial lasts so long
MACHINE = "machine"  # the turn in which the machine itself is measured
TINY = 64  # queries and keys of the call that initialises a library
# Threads of other libraries go on spinning for a while when their work is done (OpenMP's do, for milliseconds).
SETTLE_SECONDS = 0.02
# Largest difference between two arrays, relative to the largest element; twice that for gradients, which PyTorch sums
# over the query heads that share a key in the dtype itself.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
TF32_TOLERANCE = 2e-3  # of float32 where MLX multiplies in TF32
# No array counts as smaller than this part of the largest of its call: where queries see a single key, the gradients of
# query and key are zero, and what is computed is rounding.
NEGLIGIBLE = 1e-2


class Entrant:
    """An implementation that takes part."""

    def __init__(self, name: str, work: Workload, pass_: Pass, inputs: Inputs, precision: Precision) -> None:
        make = partial(IMPLEMENTATIONS[name], precision=precision)
        tiny = replace(work, query_len=min(TINY, work.query_len), seq_len=min(TINY, work.seq_len))
        contestant = make(tiny, pass_, tiny.inputs(seed=0))
        contestant.compute([contestant.prepare()])
        self.contestant = make(work, pass_, inputs)
        self.spent = 0.0  # seconds, with all that is not counted
        self.calls = 1  # in one trial

    def warm_up(self) -> list[np.ndarray]:
        """The results; notes how much memory a call needs, and how many calls make a trial."""
        mx.synchronize()
        with peak_memory() as peak:
            seconds, results = self.timed()
            self.peak_memory = peak()
        # The first call was cold, up to so many times slower than the others; on a GPU its kernel was also compiled.
        if seconds < 10 * TRIAL_SECONDS or machine.kind() == "gpu":
            seconds, _ = self.timed()
        while seconds < TRIAL_SECONDS:
            self.calls *= 2
            seconds, _ = self.timed()
        return self.contestant.as_numpy(results)

    def timed(self) -> tuple[float, Sequence[Any]]:
        """The seconds of one trial, without what prepares its calls, and the results of a call."""
        began = time.perf_counter()
        prepared = [self.contestant.prepare() for _ in range(self.calls)]
        mx.synchronize()
        time.sleep(SETTLE_SECONDS)
        with no_garbage_collection():
            start = time.perf_counter()
            results = self.contestant.compute(prepared)
            end = time.perf_counter()
        self.spent += end - began
        return end - start, results


def hold(work: Workload, pass_: Pass, names: Sequence[str], settings: Settings) -> Generator[Trial | None, None, None]:
    """The trials of these implementations; None for one that was left out. The others are compared with the first.

    An implementation that has spent `max_seconds` takes no further trials, but one it always takes; 0: no limit.
    """
    problem = f"{work}" if pass_ == "forward" else f"{work}, {pass_}"
    with failing(f"cannot make inputs for {problem}"):
        inputs = work.inputs(settings.seed)
    entrants: dict[str, Entrant] = {}
    expected: list[np.ndarray] = []  # what the first has computed
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
                seconds = entrant.timed()[0]  # its results go before the next turn
                yield Trial(work, pass_, turn, entrant.peak_memory, entrant.calls, seconds / entrant.calls, bounds)


def _difference(dtype: str, pass_: Pass, expected: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> str:
    """What of the results differs by more than rounding; nothing if they agree."""
    largest = [float(np.abs(array).max()) for array in expected]
    tolerance = TF32_TOLERANCE if dtype == "float32" and machine.tf32() else TOLERANCE[dtype]
    for what, size, one, two in zip(RESULTS[pass_], largest, expected, results, strict=True):
        relative = float(np.abs(one - two).max()) / max(size, NEGLIGIBLE * max(largest))
        limit = tolerance if what == "output" else 2 * tolerance
        if not relative <= limit:  # NaN is no agreement either
            return f"the {what} differs by {relative:.1e} of the largest element, expected at most {limit:.0e}"
    return ""


def order(names: Sequence[str], number: int) -> list[str]:
    """Everybody is first as often as last, and follows no one more often than another: there and back, then rotated."""
    first = number // 2 % len(names)
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if number % 2 else turned
