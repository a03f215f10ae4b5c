"""Describes the result of `kernels`: one table, and a row of charts for each pass and setting."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan

from flash_evals.pages import chart, units
from flash_evals.pages.chart import Axis, Chart, Point, Series
from flash_evals.pages.description import Comparison, Description, Table, grouped
from flash_evals.pages.units import figure
from flash_evals.results import claims
from flash_evals.results.claims import Ratio, percentile, quotient, times
from flash_evals.results.kernels_result import Config, Entry, Figures, by_problem
from flash_evals.results.workload import PASSES, Pass

SHARE = Axis(units.share, logarithmic=False)
LOOK_OF = {"flash": "on", "mlx": "off", "naive": "naive", "torch": "torch"}


@dataclass(frozen=True)
class Call:
    """One pass of one implementation."""

    config: Config
    pass_: Pass
    figures: Figures
    flash: Figures | None  # flash's figures on the same work, if any
    speed: float  # GFLOP/s; for a decode step GB/s
    share: float  # speed / the machine's speed_bound

    @property
    def ratio(self) -> Ratio:
        """This call's time divided by flash's time. Unknown for flash itself."""
        if self.flash is None or self.config.impl == "flash":
            return Ratio(None, apart=False)
        return Ratio.of(quotient(self.figures.time, self.flash.time), self.figures.trials, self.flash.trials)

    @property
    def setting(self) -> str:
        """In words: `forward, 14/2x64, float32, causal, prefill, batch size 1`."""
        config = self.config
        prefill = config.query_len == config.seq_len
        queries = "prefill" if prefill else "decode" if config.is_decode else f"{config.query_len:,} queries"
        batch = f"batch size {config.batch_size}"
        return ", ".join((self.pass_, config.shape, config.storage, config.visible, queries, batch))


def description(entries: Sequence[Entry]) -> Description:
    calls = _calls(entries)
    if not calls:
        raise ValueError("no entry of this file has a measured pass")
    runs = [(each.settings, each.machine, each.config.visible, each.config.is_decode) for each in entries]
    if any(run != runs[0] for run in runs):
        raise ValueError("this file has entries of several runs, and a page shows one run: write one file for each run")
    config, settings, machine = entries[0].config, entries[0].settings, entries[0].machine
    several = len({call.pass_ for call in calls}) > 1
    what = "attention" if several else f"attention {calls[0].pass_}"
    kind = f"{what}, {config.visible}, batch size {config.batch_size}"
    return Description(
        entries,
        [kind, machine.device, ", ".join(_bounds(entries))],
        [_table(calls, several)],
        [*_means(calls, several), *machine.bounds],
        only="trials" if settings.interrupted else "",
        command="kernels",
        title="Attention kernels by themselves",
        charts=[(title, _charts(row)) for title, row in grouped(calls, lambda call: call.setting).items()],
        comparisons=[
            Comparison(call.pass_, call.config.impl, call.ratio, Ratio(memory, apart=True))
            for call in calls
            if call.flash and call.ratio.value is not None
            for memory in [quotient(call.flash.peak_memory, call.figures.peak_memory)]
        ],
        about={"settings": settings, "machine": machine},
    )


def _calls(entries: Sequence[Entry]) -> list[Call]:
    """All measured calls, ordered by problem, then by pass."""
    calls = []
    for problem in by_problem(entries):
        for pass_ in PASSES:
            flash = problem["flash"].passes.get(pass_) if "flash" in problem else None
            for entry in problem.values():
                if figures := entry.passes.get(pass_):
                    speed = entry.speed(pass_)
                    share = speed / (entry.speed_bound or nan)  # a file may hold 0
                    calls.append(Call(entry.config, pass_, figures, flash, speed, share))
    return calls


def _bounds(entries: Sequence[Entry]) -> list[str]:
    """The machine's measured speeds in words, such as `peak 127–129 GFLOP/s` and `reads 10 GB/s`."""
    peaks = [1000 * entry.roofline.peak for entry in entries]
    reads = [entry.roofline.read for entry in entries]
    texts = []
    for name, values, unit in (("peak", peaks, "GFLOP/s"), ("reads", reads, "GB/s")):
        low, high = units.whole(min(values)), units.whole(max(values))
        texts.append(f"{name} {low if low == high else f'{low}–{high}'} {unit}")
    return texts


def _table(calls: Sequence[Call], several: bool) -> Table:
    """`several` says whether there are several passes. If so, the table has a column that names the pass."""
    speed = ["K/V GB/s", "of reads"] if calls[0].config.is_decode else ["GFLOP/s", "of peak"]
    names = ["shape", "dtype", "queries", "keys", *(["pass"] if several else []), "impl"]
    return Table(
        "One call of each implementation",
        [*names, "time", *speed, "flash is", "memory", "trials"],
        [_row(call, several) for call in calls],
        names=(4, *([1] if several else []), 1),
    )


def _row(call: Call, several: bool) -> list[str]:
    config, trials = call.config, call.figures.trials
    low, high = (percentile(trials, share) for share in (0.2, 0.8))
    return [
        *(config.shape, config.storage, units.whole(config.query_len), units.whole(config.seq_len)),
        *([call.pass_] if several else []),
        call.config.impl,
        units.duration(statistics.median(trials), low, high),
        figure(call.speed, units.rate),
        figure(call.share, units.share),
        _faster(call.ratio),
        figure(call.figures.peak_memory, units.megabytes),
        str(len(trials)),
    ]


def _faster(than: Ratio) -> str:
    if than.value is None:
        return ""
    if not than.sign:
        return claims.NOTHING
    value, word = (than.value, "faster") if than.sign > 0 else (1 / than.value, "slower")
    return f"{times(value)} {word}"


def _means(calls: Sequence[Call], several: bool) -> list[str]:
    """For each pass and implementation that has several ratios, returns a line with their geometric mean and range."""
    lines: list[str] = []
    for (pass_, name), of_both in grouped(calls, lambda call: (call.pass_, call.config.impl)).items():
        ratios = [call.ratio for call in of_both]
        values = [each.value for each in ratios if each.value is not None]
        if len(values) > 1:
            spread = f"{times(min(values))}–{times(max(values))} over {len(values)} shapes"
            if unclear := sum(each.sign == 0 for each in ratios):
                spread += f", {claims.NOTHING} in {unclear}"
            mean = times(statistics.geometric_mean(values))
            lines.append(f"flash against {name}{f', {pass_}' if several else ''}: {mean} as fast ({spread})")
    return lines


def _charts(calls: Sequence[Call]) -> list[Chart]:
    by_impl = grouped(calls, lambda call: call.config.impl).items()
    bound = "what the machine reads" if calls[0].config.is_decode else "the machine's peak"

    def lines(point: Callable[[Call], Point]) -> list[Series]:
        return [Series(impl, LOOK_OF.get(impl, "other"), list(map(point, of_impl))) for impl, of_impl in by_impl]

    def time(call: Call) -> Point:
        return Point(call.config.seq_len, call.figures.time, call.figures.time_p20, call.figures.time_p80)

    memory = lines(lambda call: Point(call.config.seq_len, call.figures.peak_memory))
    held = {call.config.seq_len: call.figures.held for call in calls}
    memory.append(Series("inputs and outputs", "bound", [Point(keys, size) for keys, size in held.items()]))
    share = lines(lambda call: Point(call.config.seq_len, call.share))
    return [
        Chart("Time of a call", chart.TIME, "keys", lines(time)),
        Chart("Memory of a call", chart.MEMORY, "keys", memory),
        Chart(f"Share of {bound}", SHARE, "keys", share),
    ]
