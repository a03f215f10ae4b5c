"""Result files of `kernels` on the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from flash_evals.claims import Ratio, quotient, times
from flash_evals.kernels_result import Config, Entry, Figures, bounds
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Axis, Chart, Line, Point, point
from flash_evals.page.html import Content, Html, figure, table
from flash_evals.page.run import Comparison, Run

SHARE = Axis(units.share, units.percent_tick, logarithmic=False)
SPEED = Axis(units.rate, units.number_tick, logarithmic=False)
LOOKS = {"flash": "on", "mlx": "off", "naive": "naive", "torch": "torch"}


@dataclass(frozen=True)
class Call:
    """One pass of one implementation."""

    panel: str  # what all calls of a table and of its charts share
    impl: str
    entry: Entry
    figures: Figures
    speed: float  # GFLOP/s, of a decode step GB/s
    share: float | None  # of what the machine reaches

    @property
    def keys(self) -> int:
        return self.entry.config.seq_len


Contests = dict[int, dict[str, Call]]  # of one panel by keys, then by implementation


def read(file: str, entries: Sequence[Entry]) -> list[Run]:
    """One for each machine and its settings: a file may be put together from several."""
    parts = run.grouped(entries, lambda entry: msgspec.json.encode((entry.settings, entry.machine)))
    return [_read_part(file, of_part) for of_part in parts.values()]


def _read_part(file: str, entries: Sequence[Entry]) -> Run:
    contests = _contests(entries)
    if not contests:
        raise ValueError("no pass of its entries was measured")
    settings, machine = entries[0].settings, entries[0].machine
    of_a_problem = [calls for panel in contests.values() for calls in panel.values()]
    return Run(
        file,
        "kernels",
        "Attention kernels by themselves",
        [machine.device, *bounds(entries)],
        [part for title, panel in contests.items() for part in (_table(title, panel), drawing.row(_charts(panel)))],
        run.about((("settings", settings), ("machine", machine))),
        any("flash" in calls for calls in of_a_problem),
        settings.interrupted,
        [comparison for calls in of_a_problem for comparison in _comparisons(calls)],
    )


def panels(entries: Sequence[Entry]) -> list[tuple[str, list[Chart]]]:
    """The charts of a file of one machine, and what each row of them is of."""
    return [(title, _charts(panel)) for title, panel in _contests(entries).items()]


def _contests(entries: Sequence[Entry]) -> dict[str, Contests]:
    contests: dict[str, Contests] = {}
    for entry in entries:
        for pass_, figures in entry.passes.items():
            speed, config = entry.speed(pass_), entry.config
            call = Call(
                f"{pass_}, {_setting(config)}", config.impl, entry, figures, speed, quotient(speed, entry.speed_bound)
            )
            contests.setdefault(call.panel, {}).setdefault(call.keys, {})[call.impl] = call
    return contests


def _setting(config: Config) -> str:
    """`14/2x64, float32, causal, prefill, batch size 1`."""
    prefill = config.query_len == config.seq_len
    queries = "prefill" if prefill else "decode" if config.is_decode else f"{config.query_len:,} queries"
    return f"{config.shape}, {config.storage}, {config.visible}, {queries}, batch size {config.batch_size}"


def _all(panel: Contests) -> list[Call]:
    return [call for calls in panel.values() for call in calls.values()]


def _table(title: str, panel: Contests) -> Html:
    speed = ["K/V GB/s", "of reads"] if _all(panel)[0].entry.config.is_decode else ["GFLOP/s", "of peak"]
    return table(
        title,
        ["keys, implementation", "time", "20th to 80th percentile", *speed, "flash is", "memory"],
        [
            [
                f"{units.whole(call.keys)}, {call.impl}",
                figure(call.figures.time, units.seconds),
                [figure(call.figures.time_p20, units.seconds), " to ", figure(call.figures.time_p80, units.seconds)],
                figure(call.speed, units.rate),
                figure(call.share, units.share),
                _faster(panel[call.keys].get("flash"), call),
                figure(call.figures.peak_memory, units.megabytes),
            ]
            for call in _all(panel)
        ],
    )


def _faster(flash: Call | None, other: Call) -> Content:
    if other.impl == "flash":
        return ""
    ratio = _speed(flash, other) if flash else Ratio(None, apart=False)
    return [figure(ratio.value, times), " as fast", ratio.mark]


def _speed(flash: Call, other: Call) -> Ratio:
    return Ratio.of(quotient(other.figures.time, flash.figures.time), other.figures.trials, flash.figures.trials)


def _comparisons(calls: dict[str, Call]) -> list[Comparison]:
    flash = calls.get("flash")
    return [
        Comparison(
            flash.panel.split(",")[0],
            other.impl,
            _speed(flash, other),
            Ratio(quotient(flash.figures.peak_memory, other.figures.peak_memory), apart=True),
        )
        for other in calls.values()
        if flash and other is not flash
    ]


def _charts(panel: Contests) -> list[Chart]:
    calls = _all(panel)
    by_impl = run.grouped(calls, lambda call: call.impl)
    decode = calls[0].entry.config.is_decode

    def lines(at: Callable[[Call], Point | None]) -> list[Line]:
        return [(impl, LOOKS.get(impl, "other"), [at(call) for call in of_impl]) for impl, of_impl in by_impl.items()]

    held = {each.keys: each.figures.held for each in calls}
    reference = ("inputs and outputs", "bound", [point(keys, megabytes) for keys, megabytes in held.items()])
    if any(each.share is not None for each in calls):
        title = "Share of what the machine reads" if decode else "Share of the machine's peak"
        speed = chart.chart(title, SHARE, "keys", lines(lambda call: point(call.keys, call.share)))
    else:
        title = "Keys and values read, GB/s" if decode else "GFLOP/s"
        speed = chart.chart(title, SPEED, "keys", lines(lambda call: point(call.keys, call.speed)))
    memory = lines(lambda call: point(call.keys, call.figures.peak_memory))
    return [
        chart.chart("Time of a call", chart.TIME, "keys", lines(_time)),
        chart.chart("Memory of a call", chart.MEMORY, "keys", [*memory, reference]),
        speed,
    ]


def _time(call: Call) -> Point | None:
    return point(call.keys, call.figures.time, call.figures.time_p20, call.figures.time_p80)
