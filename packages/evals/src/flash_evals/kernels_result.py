"""What `flash-eval kernels` found: the entries of its result file, the rows of --csv.

An entry is one implementation on one problem, in one or more passes, and can be read without the others.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec import field
from msgspec.structs import asdict

from flash_evals import claims, machine
from flash_evals.contest import Contest, Timings
from flash_evals.machine import Machine
from flash_evals.record import Amount, Count, Record
from flash_evals.workload import PASSES, Pass, Workload

NONE = math.nan  # a figure that an entry does not have


class Config(Workload):
    impl: str
    device: str


class Figures(Record, omit_defaults=True):
    """Of a call of one pass; none of them where it was not measured."""

    time: Amount = field(name="time(s)", default=NONE)  # median
    time_p20: Amount = field(name="time_p20(s)", default=NONE)
    time_p80: Amount = field(name="time_p80(s)", default=NONE)
    flops: Amount = field(name="FLOPS(TFLOPs/s)", default=NONE)
    read: Amount = field(name="read(GB/s)", default=NONE)  # forward alone
    peak_memory: Amount = field(name="peak_memory_usage(MB)", default=NONE)
    held: Amount = field(name="inputs_and_outputs(MB)", default=NONE)
    trials: list[Amount] = field(name="trials(s)", default_factory=list)
    calls_per_trial: Count = 0


class Roofline(Record):
    """What the machine reached beside them, if it was measured."""

    peak: Amount | None = field(name="peak(TFLOPs/s)")
    read: Amount | None = field(name="read(GB/s)")


class Settings(Record):
    repetitions: Count
    max_seconds: Amount
    seed: Count
    memory: str
    interrupted: bool


class Entry(Record):
    config: Config
    forward: Figures
    backward: Figures
    forward_backward: Figures
    peak_memory: Amount = field(name="peak_memory_usage(MB)")
    held: Amount = field(name="inputs_and_outputs(MB)")
    roofline: Roofline
    settings: Settings
    machine: Machine

    @property
    def passes(self) -> dict[Pass, Figures]:
        """Those that were measured."""
        figures: dict[Pass, Figures] = {pass_: getattr(self, pass_) for pass_ in PASSES}
        return {pass_: found for pass_, found in figures.items() if found.trials}

    def speed(self, pass_: Pass) -> float:
        """GFLOP/s; GB/s of keys and values for a decode step, which reading bounds."""
        figures = self.passes[pass_]
        return figures.read if self.config.is_decode else 1000 * figures.flops

    @property
    def speed_bound(self) -> float | None:
        """What the machine reached beside it, in the same unit; None if that was not measured."""
        bound = self.roofline.read if self.config.is_decode else self.roofline.peak
        return bound if bound is None or self.config.is_decode else 1000 * bound


Contestants = dict[str, Entry]  # of one problem, by implementation


def entries(contests: Iterable[Contest], settings: Settings, on: Machine) -> list[Entry]:
    """The implementations that have finished a trial. The passes of a problem follow each other."""
    groups = groupby(contests, key=lambda contest: contest.workload)
    return [entry for work, group in groups for entry in _of_problem(work, list(group), settings, on)]


def _of_problem(work: Workload, contests: Sequence[Contest], settings: Settings, on: Machine) -> list[Entry]:
    roofline = Roofline(
        peak=_median([peak for contest in contests for peak in contest.peak_flops], 1e12),
        read=_median([read for contest in contests for read in contest.bandwidth], 1e9),
    )
    by_impl: dict[str, dict[Pass, Figures]] = {}
    for contest in contests:
        for name, timings in contest.timings.items():
            if timings.trials:
                by_impl.setdefault(name, {})[contest.pass_] = _figures_of(work, contest.pass_, timings)
    return [
        Entry(
            config=Config(**asdict(work), impl=name, device=machine.kind()),
            **{pass_: passes.get(pass_, Figures()) for pass_ in PASSES},
            peak_memory=max(figures.peak_memory for figures in passes.values()),
            held=max(figures.held for figures in passes.values()),
            roofline=roofline,
            settings=settings,
            machine=on,
        )
        for name, passes in by_impl.items()
    ]


def _figures_of(work: Workload, pass_: Pass, timings: Timings) -> Figures:
    seconds = statistics.median(timings.trials)
    return Figures(
        time=seconds,
        time_p20=claims.percentile(timings.trials, 0.2),
        time_p80=claims.percentile(timings.trials, 0.8),
        flops=work.flops(pass_) / seconds / 1e12,
        read=work.bytes_read / seconds / 1e9 if pass_ == "forward" else NONE,
        peak_memory=timings.peak_memory / 1e6,
        held=work.bytes_held(pass_) / 1e6,
        trials=timings.trials,
        calls_per_trial=timings.calls,
    )


def _median(values: Sequence[float], unit: float) -> float | None:
    return statistics.median(values) / unit if values else None


def csv_rows(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """One row for each trial of each implementation and pass."""
    return [
        {**asdict(entry.config), "pass": pass_, "trial": number, "time(s)": seconds}
        for entry in entries
        for pass_, figures in entry.passes.items()
        for number, seconds in enumerate(figures.trials)
    ]


def by_problem(entries: Iterable[Entry]) -> list[Contestants]:
    """In the order in which they were measured."""
    problems: dict[bytes, Contestants] = {}
    for entry in entries:
        problem = msgspec.json.encode(msgspec.structs.replace(entry.config, impl=""))
        if problems.setdefault(problem, {}).setdefault(entry.config.impl, entry) is not entry:
            raise ValueError(f"two entries of {entry.config.impl} for one problem")
    return list(problems.values())
