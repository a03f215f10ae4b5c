"""What `kernels` found, described: one table; and for each pass of each setting a row of charts."""

import statistics
from collections.abc import Callable, Sequence
from math import nan

import msgspec

from flash_evals import claims
from flash_evals.claims import Ratio, quotient, times
from flash_evals.kernel_results import Contestants, Entry, by_problem, passes_of
from flash_evals.output import percentile
from flash_evals.page import chart, units
from flash_evals.page.chart import Axis, Chart, Point, Series
from flash_evals.page.description import Comparison, Description, Table, interrupted
from flash_evals.page.model import grouped
from flash_evals.page.units import Cell, Figure, figure
from flash_evals.workload import Pass

SHARE = Axis(units.share, units.percent_tick, logarithmic=False)
SPEED = Axis(units.rate, units.number_tick, logarithmic=False)
LOOKS = {"flash": "on", "mlx": "off", "naive": "naive", "torch": "torch"}


def runs(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Those of each run of the command: a file may be put together from several."""

    def shared(entry: Entry) -> bytes:
        config = entry.config
        work = (config.visible, config.batch_size, config.is_decode)
        return msgspec.json.encode((entry.settings, entry.machine, work))

    return list(grouped(entries, shared).values())


def description(entries: Sequence[Entry]) -> Description:
    passes, config = passes_of(entries), entries[0].config
    settings, machine = entries[0].settings, entries[0].machine
    if not passes:
        raise ValueError("no pass of its entries was measured")
    what = "attention" if len(passes) > 1 else f"attention {passes[0]}"
    kind = f"{what}, {config.visible}, batch size {config.batch_size}"
    problems = by_problem(entries)
    return Description(
        entries,
        [kind, machine.device, *filter(None, [", ".join(_bounds(entries))])],
        [_table(problems, passes, config.is_decode)],
        _means(problems, passes),
        [interrupted("trials")] if settings.interrupted else [],
        command="kernels",
        title="Attention kernels by themselves",
        charts=[row for of_setting in grouped(entries, _setting).items() for row in _charts(*of_setting)],
        comparisons=[each for problem in problems for pass_ in passes for each in _comparisons(problem, pass_)],
        about={"settings": settings, "machine": machine},
    )


def _bounds(entries: Sequence[Entry]) -> list[str]:
    """What the machine reached beside them: `peak 127–129 GFLOP/s`, `reads 10 GB/s`, as far as it was measured."""
    peaks = [1000 * entry.roofline.peak for entry in entries if entry.roofline.peak]
    reads = [entry.roofline.read for entry in entries if entry.roofline.read]
    texts = []
    for name, values, unit in (("peak", peaks, "GFLOP/s"), ("reads", reads, "GB/s")):
        if values:
            low, high = units.whole(min(values)), units.whole(max(values))
            texts.append(f"{name} {low if low == high else f'{low}–{high}'} {unit}")
    return texts


def _table(problems: Sequence[Contestants], passes: Sequence[Pass], decode: bool) -> Table:
    """A row for each problem, pass and implementation."""
    several = len(passes) > 1
    speed = ["K/V GB/s", "of reads"] if decode else ["GFLOP/s", "of peak"]
    head = ["shape", "dtype", "queries", "keys", *(["pass"] if several else []), "impl", "time", *speed]
    rows = []
    for problem in problems:
        config = next(iter(problem.values())).config
        work = [config.shape, config.storage, units.whole(config.query_len), units.whole(config.seq_len)]
        for pass_ in passes:
            names = [name for name, entry in problem.items() if pass_ in entry.passes]
            rows += [[*work, *([pass_] if several else []), name, *_figures(problem, name, pass_)] for name in names]
    groups = (4, *([1] if several else []), 1)
    return Table("One call of each implementation", [*head, "flash is", "memory", "trials"], rows, groups)


def _figures(problem: Contestants, name: str, pass_: Pass) -> list[Cell]:
    entry = problem[name]
    figures = entry.passes[pass_]
    low, high = (percentile(figures.trials, share) for share in (0.2, 0.8))
    return [
        units.duration(statistics.median(figures.trials), low, high),
        figure(entry.speed(pass_), units.rate),
        figure(_share(entry, pass_), units.share),
        _faster(ratio(problem, name, pass_)),
        figure(figures.peak_memory, units.megabytes),
        str(len(figures.trials)),
    ]


def _share(entry: Entry, pass_: Pass) -> float:
    """Of what the machine reaches; NaN if that was not measured."""
    return entry.speed(pass_) / (entry.speed_bound or nan)


def ratio(problem: Contestants, name: str, pass_: Pass) -> Ratio:
    """The time of that implementation over flash's; not known of flash itself, and if one did not take part."""
    if name == "flash" or not all(each in problem and pass_ in problem[each].passes for each in (name, "flash")):
        return Ratio(None, apart=False)
    other, flash = (problem[each].passes[pass_] for each in (name, "flash"))
    return Ratio.of(quotient(other.time, flash.time), other.trials, flash.trials)


def _faster(than: Ratio) -> Cell:
    if than.value is None:
        return ""
    if not than.sign:
        return claims.NOTHING
    if than.sign > 0:
        return [Figure(times(than.value), than.value), " faster"]
    return [Figure(times(1 / than.value), 1 / than.value), " slower"]


def _means(problems: Sequence[Contestants], passes: Sequence[Pass]) -> list[Cell]:
    """For each implementation and pass that has several ratios to flash: their geometric mean and range."""
    lines: list[Cell] = []
    for pass_ in passes:
        for name in dict.fromkeys(name for problem in problems for name in problem):
            ratios = [ratio(problem, name, pass_) for problem in problems]
            values = [each.value for each in ratios if each.value is not None]
            if len(values) > 1:
                who = f"{name}, {pass_}" if len(passes) > 1 else name
                spread = f"{times(min(values))}–{times(max(values))} over {len(values)} shapes"
                if unclear := sum(each.sign == 0 for each in ratios):
                    spread += f", {claims.NOTHING} in {unclear}"
                mean = figure(statistics.geometric_mean(values), times)
                lines.append([f"flash against {who}: ", mean, f" ({spread})"])
    return lines


def _comparisons(problem: Contestants, pass_: Pass) -> list[Comparison]:
    return [
        Comparison(pass_, name, speed, Ratio(quotient(flash.peak_memory, other.peak_memory), apart=True))
        for name in problem
        for speed in [ratio(problem, name, pass_)]
        if speed.value is not None
        for flash, other in [(problem["flash"].passes[pass_], problem[name].passes[pass_])]
    ]


def _setting(entry: Entry) -> str:
    """`14/2x64, float32, causal, prefill, batch size 1`."""
    config = entry.config
    prefill = config.query_len == config.seq_len
    queries = "prefill" if prefill else "decode" if config.is_decode else f"{config.query_len:,} queries"
    return f"{config.shape}, {config.storage}, {config.visible}, {queries}, batch size {config.batch_size}"


def _charts(setting: str, entries: Sequence[Entry]) -> list[tuple[str, list[Chart]]]:
    return [
        (f"{pass_}, {setting}", _panel([entry for entry in entries if pass_ in entry.passes], pass_))
        for pass_ in passes_of(entries)
    ]


def _panel(entries: Sequence[Entry], pass_: Pass) -> list[Chart]:
    by_impl = grouped(entries, lambda entry: entry.config.impl)
    decode = entries[0].config.is_decode

    def lines(at: Callable[[Entry], Point]) -> list[Series]:
        return [Series(impl, LOOKS.get(impl, "other"), [at(entry) for entry in of]) for impl, of in by_impl.items()]

    def time(entry: Entry) -> Point:
        figures = entry.passes[pass_]
        return Point(entry.config.seq_len, figures.time, figures.time_p20, figures.time_p80)

    memory = lines(lambda entry: Point(entry.config.seq_len, entry.passes[pass_].peak_memory))
    held = {entry.config.seq_len: entry.passes[pass_].held for entry in entries}
    memory.append(Series("inputs and outputs", "bound", [Point(keys, size) for keys, size in held.items()]))
    if any(entry.speed_bound for entry in entries):
        title = "Share of what the machine reads" if decode else "Share of the machine's peak"
        axis, speed = SHARE, lines(lambda entry: Point(entry.config.seq_len, _share(entry, pass_)))
    else:
        title = "Keys and values read, GB/s" if decode else "GFLOP/s"
        axis, speed = SPEED, lines(lambda entry: Point(entry.config.seq_len, entry.speed(pass_)))
    return [
        Chart("Time of a call", chart.TIME, "keys", lines(time)),
        Chart("Memory of a call", chart.MEMORY, "keys", memory),
        Chart(title, axis, "keys", speed),
    ]
