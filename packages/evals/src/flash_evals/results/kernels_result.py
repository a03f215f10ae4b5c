"""The records that `flash-eval kernels` writes: the entries of its result file, made from trials.

An entry is one implementation on one problem, in one or more passes. It repeats the run's settings and machine.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flashattn_core.arguments import Precision
from msgspec import field
from msgspec.structs import asdict, replace

from flash_evals.results import claims
from flash_evals.results.provenance import Machine
from flash_evals.results.record import Amount, Count, Record
from flash_evals.results.workload import PASSES, Pass, Workload

NONE = math.nan  # a figure that an entry does not have


class Settings(Record):
    repetitions: Count
    max_seconds: Amount
    seed: Count
    memory: str
    interrupted: bool
    precision: Precision = "float32"  # flash's precision; files without this field were measured in float32


class Trial(NamedTuple):
    workload: Workload
    pass_: Pass
    impl: str
    peak_memory: int  # bytes beyond the inputs; a backward pass includes the forward pass before it
    calls: int
    seconds: float  # of one call
    bounds: list[tuple[float, float]]  # the machine's measured (FLOP/s, bytes/s), once per repetition


class Config(Workload, frozen=True):
    impl: str
    device: str


class Figures(Record, omit_defaults=True):
    """The figures of one pass. They keep their defaults if the pass was not measured."""

    time: Amount = field(name="time(s)", default=NONE)  # median
    time_p20: Amount = field(name="time_p20(s)", default=NONE)
    time_p80: Amount = field(name="time_p80(s)", default=NONE)
    flops: Amount = field(name="FLOPS(TFLOPs/s)", default=NONE)
    read: Amount = field(name="read(GB/s)", default=NONE)  # only for forward passes
    peak_memory: Amount = field(name="peak_memory_usage(MB)", default=NONE)
    held: Amount = field(name="inputs_and_outputs(MB)", default=NONE)
    trials: list[Amount] = field(name="trials(s)", default_factory=list)
    calls_per_trial: Count = 0


class Roofline(Record):
    """The speeds that the machine itself reaches, measured between the trials."""

    peak: Amount = field(name="peak(TFLOPs/s)")
    read: Amount = field(name="read(GB/s)")


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
        """The passes that were measured, with their figures."""
        return {pass_: figures for pass_ in PASSES if (figures := getattr(self, pass_)).trials}

    def speed(self, pass_: Pass) -> float:
        """The speed in GFLOP/s. For decode steps it is in GB/s of keys and values, because memory limits them."""
        figures = self.passes[pass_]
        return figures.read if self.config.is_decode else 1000 * figures.flops

    @property
    def speed_bound(self) -> float:
        """The machine's limit for speed(), in the unit of speed()."""
        return self.roofline.read if self.config.is_decode else 1000 * self.roofline.peak


def entries(trials: Iterable[Trial | None], settings: Settings, device: str, on: Machine) -> Iterator[Entry]:
    """Makes an entry for each implementation of each problem, in the order in which they were measured."""
    groups: dict[tuple[Workload, str], dict[Pass, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for trial in filter(None, trials):
        groups[trial.workload, trial.impl][trial.pass_].append(trial)
    for (work, impl), passes in groups.items():
        figures = {pass_: _figures(of_pass) for pass_, of_pass in passes.items()}
        bounds = [bound for first, *_ in passes.values() for bound in first.bounds]
        peak, read = (statistics.median(column) for column in zip(*bounds, strict=True))
        yield Entry(
            config=Config(**asdict(work), impl=impl, device=device),
            **{pass_: figures.get(pass_, Figures()) for pass_ in PASSES},
            peak_memory=max(each.peak_memory for each in figures.values()),
            held=max(each.held for each in figures.values()),
            roofline=Roofline(peak / 1e12, read / 1e9),
            settings=settings,
            machine=on,
        )


def _figures(trials: Sequence[Trial]) -> Figures:
    work, pass_, _, peak_memory, calls, *_ = trials[0]
    seconds = [trial.seconds for trial in trials]
    median = statistics.median(seconds)
    return Figures(
        time=median,
        time_p20=claims.percentile(seconds, 0.2),
        time_p80=claims.percentile(seconds, 0.8),
        flops=work.flops(pass_) / median / 1e12,
        read=work.bytes_read / median / 1e9 if pass_ == "forward" else NONE,
        peak_memory=peak_memory / 1e6,
        held=work.bytes_held(pass_) / 1e6,
        trials=seconds,
        calls_per_trial=calls,
    )


def by_problem(entries: Iterable[Entry]) -> list[dict[str, Entry]]:
    """Returns a dict (implementation -> entry) for each problem. The problems are in the order of measurement."""
    problems: dict[Config, dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        if problems[replace(entry.config, impl="")].setdefault(entry.config.impl, entry) is not entry:
            raise ValueError(f"the file has two entries of {entry.config.impl} for one problem")
    return list(problems.values())
