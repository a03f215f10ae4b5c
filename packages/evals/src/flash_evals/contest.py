"""Implementations against each other on one workload, in turns, beside the bounds of the machine.

Before the first turn each implementation makes a few calls that are not counted. One of them tells how much memory a
call needs, and its results are compared: how long a wrong result takes is of no interest.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from flash_evals import machine
from flash_evals.errors import EvalError, failing
from flash_evals.implementations import GRADIENTS, IMPLEMENTATIONS, RESULTS, Contestant
from flash_evals.measure import no_garbage_collection, peak_memory
from flash_evals.workload import Inputs, Pass, Workload

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


@dataclass
class Timings:
    """Of one implementation."""

    peak_memory: int  # bytes that one call needs beyond its inputs, a backward pass with the forward pass before it
    calls: int  # in one trial
    spent: float  # seconds, with all that is not counted
    trials: list[float] = field(default_factory=list)  # seconds for each call


@dataclass(eq=False)
class Contest:
    """Of one pass of a workload."""

    workload: Workload
    pass_: Pass
    names: Sequence[str]  # of those who take part; the others are compared with the first
    timings: dict[str, Timings] = field(default_factory=dict)
    peak_flops: list[float] = field(default_factory=list)  # FLOP/s in each round
    bandwidth: list[float] = field(default_factory=list)  # bytes/s in each round

    def __str__(self) -> str:
        return f"{self.workload}" if self.pass_ == "forward" else f"{self.workload}, {self.pass_}"

    def hold(self, trials: int, max_seconds: float, seed: int) -> Generator[None, None, None]:
        """Yields after each trial, also one that was left out.

        An implementation that has spent max_seconds takes no further trials, but one it always takes; 0: no limit.
        Whoever stops in between keeps the finished trials.
        """
        inputs = self.workload.inputs(seed)
        contestants: dict[str, Contestant] = {}
        expected: list[np.ndarray] = []  # what the first has computed
        for name in self.names:
            contestants[name], results = self._enter(name, inputs)
            expected = expected or results
            self._require_agreement(name, results, expected)
        del inputs, expected, results
        for number in range(trials):
            for turn in order([MACHINE, *self.names], number):
                if turn == MACHINE:
                    self.peak_flops.append(machine.peak_flops(self.workload.dtype))
                    self.bandwidth.append(machine.bandwidth())
                    continue
                timings = self.timings[turn]
                if not timings.trials or not max_seconds or timings.spent < max_seconds:
                    began = time.perf_counter()
                    timings.trials.append(timed(contestants[turn], timings.calls) / timings.calls)
                    timings.spent += time.perf_counter() - began
                yield

    def _enter(self, name: str, inputs: Inputs) -> tuple[Contestant, list[np.ndarray]]:
        """The implementation made ready, and its results; notes how many of its calls make a trial.

        Raises EvalError if it does not cover the workload.
        """
        make, work = IMPLEMENTATIONS[name], self.workload
        tiny = replace(work, query_len=min(TINY, work.query_len), seq_len=min(TINY, work.seq_len))
        with failing(f"{name} cannot compute {self}"):
            contestant = make(tiny, self.pass_, tiny.inputs(seed=0))
            contestant.compute([contestant.prepare()])
            contestant = make(work, self.pass_, inputs)
            mx.synchronize()
            with peak_memory() as peak:
                began = time.perf_counter()
                prepared = [contestant.prepare()]
                start = time.perf_counter()
                results = contestant.compute(prepared)
                seconds = time.perf_counter() - start
                memory = peak()
        calls = 1
        # The first call was cold, up to so many times slower than the others; on a GPU its kernel was also compiled.
        if seconds < 10 * TRIAL_SECONDS or machine.kind() == "gpu":
            seconds = timed(contestant, calls)
        while seconds < TRIAL_SECONDS:
            calls *= 2
            seconds = timed(contestant, calls)
        self.timings[name] = Timings(memory, calls, time.perf_counter() - began)
        return contestant, contestant.as_numpy(results)

    def _require_agreement(self, name: str, results: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
        dtype = self.workload.dtype
        largest = [float(np.abs(array).max()) for array in expected]
        tolerance = TF32_TOLERANCE if dtype == "float32" and machine.tf32() else TOLERANCE[dtype]
        for what, size, one, two in zip(RESULTS[self.pass_], largest, expected, results, strict=True):
            relative = float(np.abs(one - two).max()) / max(size, NEGLIGIBLE * max(largest))
            limit = tolerance * (2 if what in GRADIENTS else 1)
            if not relative <= limit:  # NaN is no agreement either
                raise EvalError(
                    f"{name} and {self.names[0]} give different results for {self}: the {what} differs by "
                    f"{relative:.1e} of the largest element, expected at most {limit:.0e}"
                )


def order(names: Sequence[str], number: int) -> list[str]:
    """Everybody is first as often as last, and follows no one more often than another: there and back, then rotated."""
    first = number // 2 % len(names)
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if number % 2 else turned


def timed(contestant: Contestant, calls: int) -> float:
    """Seconds for so many calls, without what prepares them."""
    prepared = [contestant.prepare() for _ in range(calls)]
    mx.synchronize()
    time.sleep(SETTLE_SECONDS)
    with no_garbage_collection():
        start = time.perf_counter()
        contestant.compute(prepared)
        return time.perf_counter() - start
