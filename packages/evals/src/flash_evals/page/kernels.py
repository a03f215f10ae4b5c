"""Result files of `kernels` on the page."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flash_evals.claims import Ratio, quotient, times
from flash_evals.kernel_results import HELD, PEAK_MEMORY, shape, storage
from flash_evals.page import chart, run, units
from flash_evals.page.chart import Axis, Point, Series
from flash_evals.page.html import Content, Html, figure, table
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Comparison, Run
from flash_evals.workload import PASSES

SHARE = Axis(units.share, units.percent_tick, logarithmic=False)
SPEED = Axis(units.rate, units.number_tick, logarithmic=False)
LOOKS = {"flash": "on", "mlx": "off", "naive": "naive", "torch": "torch"}


@dataclass(frozen=True)
class Problem:
    """What all entries of a table and of its charts share, in words, and what they do not: the number of keys."""

    panel: str
    keys: int
    decode: bool  # a single query: reading keys and values bounds it, not arithmetic


@dataclass(frozen=True)
class Call:
    """One pass of one implementation."""

    impl: str
    seconds: float | None
    low: float | None  # 20th percentile
    high: float | None  # 80th
    speed: float | None  # GFLOP/s, of a decode step GB/s
    bound: float | None  # what the machine reaches, in the same unit
    memory: float | None  # MB
    held: float | None  # MB of inputs and outputs
    trials: Sequence[float]

    @property
    def share(self) -> float | None:
        return quotient(self.speed, self.bound)


Contests = dict[Problem, dict[str, Call]]  # by implementation


def read(file: str, node: Node) -> list[Run]:
    """One for each machine and its settings: a file may be put together from several."""
    parts: dict[str, list[Node]] = {}
    for entry in node.items():
        key = json.dumps([entry.dict().get(part) for part in ("settings", "machine")], sort_keys=True)
        parts.setdefault(key, []).append(entry)
    if not parts:
        raise Unusable("it has no results")
    return [_read_part(file, entries) for entries in parts.values()]


def _read_part(file: str, entries: Sequence[Node]) -> Run:
    contests: Contests = {}
    for entry in entries:
        for problem, call in _calls(entry):
            contests.setdefault(problem, {})[call.impl] = call
    if not contests:
        raise Unusable("no pass of its entries was measured")
    panels: dict[str, Contests] = {}
    for problem, calls in contests.items():
        panels.setdefault(problem.panel, {})[problem] = calls
    settings, machine = (entries[0].get(part) for part in ("settings", "machine"))
    device = machine["device"].text() if machine else entries[0]["config"]["device"].text()
    return Run(
        file,
        "kernels",
        "Attention kernels by themselves",
        [device, *_bounds(entries)],
        [part for title, panel in panels.items() for part in (_table(title, panel), _charts(panel))],
        run.about((("settings", settings), ("machine", machine))),
        any("flash" in calls for calls in contests.values()),
        settings is not None and run.interrupted(settings),
        [comparison for (problem, calls) in contests.items() for comparison in _comparisons(problem, calls)],
    )


def _bounds(entries: Sequence[Node]) -> list[str]:
    """What the machine reached beside them, if it was measured."""
    texts = []
    for key, what, factor, unit in (("peak(TFLOPs/s)", "peak", 1000, "GFLOP/s"), ("read(GB/s)", "reads", 1, "GB/s")):
        values = [value * factor for entry in entries if (value := _bound(entry, key)) is not None]
        if values:
            low, high = units.whole(min(values)), units.whole(max(values))
            texts.append(f"{what} {low if low == high else f'{low}–{high}'} {unit}")
    return texts


def _bound(entry: Node, key: str) -> float | None:
    roofline = entry.get("roofline")
    return amount(roofline, key) if roofline else None


def _calls(entry: Node) -> list[tuple[Problem, Call]]:
    """Those of the passes that were measured."""
    config = entry["config"]
    keys = config["seq_len"].count()
    queries = found.count() if (found := config.get("query_len")) else keys
    decode = queries == 1
    setting = _setting(config, "prefill" if queries == keys else "decode" if decode else f"{queries:,} queries")
    key, factor = ("read(GB/s)", 1) if decode else ("FLOPS(TFLOPs/s)", 1000)
    bound = _bound(entry, "read(GB/s)" if decode else "peak(TFLOPs/s)")
    calls = []
    for pass_ in PASSES:
        figures = entry.get(pass_)
        if not figures or not figures.dict():
            continue
        speed, trials = amount(figures, key), figures.get("trials(s)")
        call = Call(
            config["impl"].text(),
            figures["time(s)"].amount(),
            amount(figures, "time_p20(s)"),
            amount(figures, "time_p80(s)"),
            speed * factor if speed is not None else None,
            bound * factor if bound is not None else None,
            amount(figures if PEAK_MEMORY in figures.dict() else entry, PEAK_MEMORY),
            amount(figures, HELD),
            [time for trial in trials.items() if (time := trial.amount()) is not None] if trials else [],
        )
        calls.append((Problem(f"{pass_}, {setting}", keys, decode), call))
    return calls


def _setting(config: Node, queries: str) -> str:
    """`14/2x64, float32, causal, prefill, batch size 1`."""
    heads: dict[str, Any] = {key: config[key].count() for key in ("num_heads", "num_kv_heads", "head_dim")}
    bits, window = config.get("kv_bits"), config.get("window")
    stored = storage({"dtype": config["dtype"].text(), "kv_bits": bits.count() if bits else None})
    seen = f"window {window.count():,}" if window else "causal" if config["causal"].flag() else "not causal"
    return f"{shape(heads)}, {stored}, {seen}, {queries}, batch size {config['batch_size'].count()}"


def _table(title: str, panel: Contests) -> Html:
    decode = next(iter(panel)).decode
    speed = ["K/V GB/s", "of reads"] if decode else ["GFLOP/s", "of peak"]
    return table(
        title,
        ["keys, implementation", "time", "20th to 80th percentile", *speed, "flash is", "memory"],
        [
            [
                f"{units.whole(problem.keys)}, {call.impl}",
                figure(call.seconds, units.seconds),
                [figure(call.low, units.seconds), " to ", figure(call.high, units.seconds)],
                figure(call.speed, units.rate),
                figure(call.share, units.share),
                _faster(calls, call),
                figure(call.memory, units.megabytes),
            ]
            for problem, calls in panel.items()
            for call in calls.values()
        ],
    )


def _faster(calls: dict[str, Call], other: Call) -> Content:
    if other.impl == "flash":
        return ""
    ratio = _speed(calls["flash"], other) if "flash" in calls else Ratio(None, apart=False)
    return [figure(ratio.value, times), " as fast", ratio.mark]


def _speed(flash: Call, other: Call) -> Ratio:
    return Ratio.of(quotient(other.seconds, flash.seconds), other.trials, flash.trials)


def _comparisons(problem: Problem, calls: dict[str, Call]) -> list[Comparison]:
    flash, work = calls.get("flash"), problem.panel.split(",")[0]
    return [
        Comparison(
            work,
            other.impl,
            _speed(flash, other),
            Ratio(quotient(flash.memory, other.memory), apart=True),
        )
        for other in calls.values()
        if flash and other is not flash
    ]


def _charts(panel: Contests) -> Html:
    names = list(dict.fromkeys(name for calls in panel.values() for name in calls))
    decode = next(iter(panel)).decode

    def series(value: Callable[[Call], float | None], spread: bool = False) -> list[Series]:
        return [
            Series(
                name,
                LOOKS.get(name, "other"),
                [
                    Point(problem.keys, at, *((call.low, call.high) if spread else ()))
                    for problem, calls in panel.items()
                    if (call := calls.get(name)) and (at := value(call)) is not None
                ],
            )
            for name in names
        ]

    held = {
        problem.keys: call.held for problem, calls in panel.items() for call in calls.values() if call.held is not None
    }
    reference = Series("inputs and outputs", "bound", [Point(keys, value) for keys, value in held.items()])
    share = chart.lines(
        "Share of what the machine reads" if decode else "Share of the machine's peak",
        SHARE,
        "keys",
        series(lambda call: call.share),
    )
    unit = "Keys and values read, GB/s" if decode else "GFLOP/s"
    return chart.row(
        [
            chart.lines("Time of a call", chart.TIME, "keys", series(lambda call: call.seconds, spread=True)),
            chart.lines("Memory of a call", chart.MEMORY, "keys", [*series(lambda call: call.memory), reference]),
            share or chart.lines(unit, SPEED, "keys", series(lambda call: call.speed)),
        ]
    )
