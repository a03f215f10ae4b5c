"""What `flash-eval kernels` found: the entries of its result file, the rows of --csv, the page of text.

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

from flash_evals import claims, machine, output
from flash_evals.claims import Ratio
from flash_evals.contest import Contest, Timings
from flash_evals.machine import Machine
from flash_evals.output import Table
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
        time_p20=output.percentile(timings.trials, 0.2),
        time_p80=output.percentile(timings.trials, 0.8),
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


def passes_of(entries: Iterable[Entry]) -> list[Pass]:
    """The passes that some entry has."""
    found = {pass_ for entry in entries for pass_ in entry.passes}
    return [pass_ for pass_ in PASSES if pass_ in found]


def by_problem(entries: Iterable[Entry]) -> list[Contestants]:
    """In the order in which they were measured."""
    groups = groupby(entries, key=lambda entry: msgspec.structs.replace(entry.config, impl=""))
    return [{entry.config.impl: entry for entry in group} for _, group in groups]


def render(entries: Sequence[Entry], table: Table = output.columns) -> str:
    """The result as a page of text."""
    problems, passes = by_problem(entries), passes_of(entries)
    rows = [_titles(entries[0], passes), *(row for problem in problems for row in _rows(problem, passes))]
    closing = _closing(problems, passes)
    if entries[0].settings.interrupted:
        closing.append("Interrupted; the figures are of the trials that were finished.")
    return "\n".join([_header(entries), "", table(rows), *(["", *closing] if closing else [])])


def _header(entries: Sequence[Entry]) -> str:
    return " · ".join([kind(entries), entries[0].machine.device, *filter(None, [", ".join(bounds(entries))])])


def bounds(entries: Sequence[Entry]) -> list[str]:
    """What the machine reached beside them: `peak 127–129 GFLOP/s`, `reads 10 GB/s`, as far as it was measured."""
    peaks = [1000 * entry.roofline.peak for entry in entries if entry.roofline.peak]
    reads = [entry.roofline.read for entry in entries if entry.roofline.read]
    texts = []
    for name, values, unit in (("peak", peaks, "GFLOP/s"), ("reads", reads, "GB/s")):
        if values:
            low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
            texts.append(f"{name} {low if low == high else f'{low}–{high}'} {unit}")
    return texts


def kind(entries: Sequence[Entry]) -> str:
    """What all problems of a run share."""
    config, passes = entries[0].config, passes_of(entries)
    what = "attention" if len(passes) > 1 else f"attention {passes[0]}"
    return f"{what}, {config.visible}, batch size {config.batch_size}"


def _titles(entry: Entry, passes: Sequence[Pass]) -> list[str]:
    shared = ["shape", "dtype", "queries", "keys", *(["pass"] if len(passes) > 1 else [])]
    unit = ("K/V GB/s", "of reads") if entry.config.is_decode else ("GFLOP/s", "of peak")
    return [*shared, "impl", "time", *unit, "flash is", "memory", "trials"]


def _rows(problem: Contestants, passes: Sequence[Pass]) -> list[list[str]]:
    """One for each pass and implementation; what they share stands in the first."""
    config = next(iter(problem.values())).config
    about = [config.shape, config.storage, f"{config.query_len:,}", f"{config.seq_len:,}"]
    rows: list[list[str]] = []
    for pass_ in passes:
        shared = [*about, *([pass_] if len(passes) > 1 else [])]
        if rows:
            shared[: len(about)] = [""] * len(about)
        for name, entry in problem.items():
            if pass_ in entry.passes:
                rows.append([*shared, name, *_figures(entry, pass_, ratio(problem, name, pass_))])
                shared = [""] * len(shared)
    return rows


def _figures(entry: Entry, pass_: Pass, against_flash: Ratio | None) -> list[str]:
    figures = entry.passes[pass_]
    share = entry.speed(pass_) / entry.speed_bound if entry.speed_bound else None
    return [
        output.duration(figures.trials),
        f"{entry.speed(pass_):,.1f}",
        "" if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}",
        _faster(against_flash),
        f"{figures.peak_memory:,.1f} MB",
        str(len(figures.trials)),
    ]


def ratio(problem: Contestants, name: str, pass_: Pass) -> Ratio | None:
    """The time of that implementation over flash's; None of flash itself, and if one of them did not take part."""
    if name == "flash" or not all(each in problem and pass_ in problem[each].passes for each in (name, "flash")):
        return None
    other, flash = (problem[each].passes[pass_] for each in (name, "flash"))
    return Ratio.of(claims.quotient(other.time, flash.time), other.trials, flash.trials)


def _faster(times: Ratio | None) -> str:
    if times is None or times.value is None:
        return ""
    words = {1: f"{claims.times(times.value)} faster", -1: f"{claims.times(1 / times.value)} slower"}
    return words.get(times.sign or 0, claims.NOTHING)


def _closing(problems: Sequence[Contestants], passes: Sequence[Pass]) -> list[str]:
    """For each implementation and pass that has several ratios to flash: their geometric mean and range."""
    lines = []
    for pass_ in passes:
        for name in dict.fromkeys(name for problem in problems for name in problem):
            ratios = [times for problem in problems if (times := ratio(problem, name, pass_)) is not None]
            if len(ratios) > 1:
                who = f"{name}, {pass_}" if len(passes) > 1 else name
                values = [each.value for each in ratios if each.value is not None]
                spread = f"{claims.times(min(values))}–{claims.times(max(values))} over {len(values)} shapes"
                if unclear := sum(each.sign == 0 for each in ratios):
                    spread += f", {claims.NOTHING} in {unclear}"
                lines.append(f"flash against {who}: {claims.times(statistics.geometric_mean(values))} ({spread})")
    return lines
