"""Result files of `kernels` on the page."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flash_evals.claims import Ratio, quotient, times
from flash_evals.kernel_results import HELD, PEAK_MEMORY, shape, storage
from flash_evals.page import chart, drawing, run, units
from flash_evals.page.chart import Axis, Chart, Line, Point, point
from flash_evals.page.html import Content, Html, figure, table
from flash_evals.page.result_file import Node, Unusable, amount
from flash_evals.page.run import Comparison, Run
from flash_evals.workload import PASSES

SHARE = Axis(units.share, units.percent_tick, logarithmic=False)
SPEED = Axis(units.rate, units.number_tick, logarithmic=False)
LOOKS = {"flash": "on", "mlx": "off", "naive": "naive", "torch": "torch"}
BOUNDS = {"peak(TFLOPs/s)": ("peak", 1000, "GFLOP/s"), "read(GB/s)": ("reads", 1, "GB/s")}


@dataclass(frozen=True)
class Call:
    """One pass of one implementation."""

    panel: str  # what all calls of a table and of its charts share
    keys: int
    impl: str
    decode: bool  # a single query: reading keys and values bounds it, not arithmetic
    seconds: float | None
    low: float | None  # 20th percentile
    high: float | None  # 80th
    speed: float | None  # GFLOP/s, of a decode step GB/s
    share: float | None  # of what the machine reaches
    memory: float | None  # MB
    held: float | None  # MB of inputs and outputs
    trials: Sequence[float]


Contests = dict[int, dict[str, Call]]  # of one panel by keys, then by implementation


def read(file: str, node: Node) -> list[Run]:
    """One for each machine and its settings: a file may be put together from several."""

    def measured(entry: Node) -> str:
        return json.dumps([entry.dict().get(part) for part in ("settings", "machine")], sort_keys=True)

    parts = run.grouped(node.items(), measured)
    if not parts:
        raise Unusable("it has no results")
    return [_read_part(file, entries) for entries in parts.values()]


def _read_part(file: str, entries: Sequence[Node]) -> Run:
    contests = _contests(entries)
    if not contests:
        raise Unusable("no pass of its entries was measured")
    settings, machine = (entries[0].get(part) for part in ("settings", "machine"))
    device = machine["device"].text() if machine else entries[0]["config"]["device"].text()
    of_a_problem = [calls for panel in contests.values() for calls in panel.values()]
    return Run(
        file,
        "kernels",
        "Attention kernels by themselves",
        [device, *filter(None, (_bound(entries, key) for key in BOUNDS))],
        [part for title, panel in contests.items() for part in (_table(title, panel), drawing.row(_charts(panel)))],
        run.about((("settings", settings), ("machine", machine))),
        any("flash" in calls for calls in of_a_problem),
        settings is not None and run.interrupted(settings),
        [comparison for calls in of_a_problem for comparison in _comparisons(calls)],
    )


def panels(node: Node) -> list[tuple[str, list[Chart]]]:
    """The charts of a file of one machine, and what each row of them is of."""
    return [(title, _charts(panel)) for title, panel in _contests(node.items()).items()]


def _bound(entries: Sequence[Node], key: str) -> str:
    """What the machine reached beside them: `peak 127–129 GFLOP/s`; empty if it was not measured."""
    what, factor, unit = BOUNDS[key]
    values = [value * factor for entry in entries if (value := _roofline(entry, key)) is not None]
    low, high = (units.whole(end(values, default=0)) for end in (min, max))
    return f"{what} {low if low == high else f'{low}–{high}'} {unit}" if values else ""


def _roofline(entry: Node, key: str) -> float | None:
    roofline = entry.get("roofline")
    return amount(roofline, key) if roofline else None


def _contests(entries: Sequence[Node]) -> dict[str, Contests]:
    contests: dict[str, Contests] = {}
    for entry in entries:
        for call in _calls(entry):
            contests.setdefault(call.panel, {}).setdefault(call.keys, {})[call.impl] = call
    return contests


def _calls(entry: Node) -> list[Call]:
    """Those of the passes that were measured."""
    config = entry["config"]
    keys = config["seq_len"].count()
    queries = found.count() if (found := config.get("query_len")) else keys
    decode = queries == 1
    setting = _setting(config, "prefill" if queries == keys else "decode" if decode else f"{queries:,} queries")
    key, bound = ("read(GB/s)", "read(GB/s)") if decode else ("FLOPS(TFLOPs/s)", "peak(TFLOPs/s)")
    calls = []
    for pass_ in PASSES:
        figures = entry.get(pass_)
        if not figures or not figures.dict():
            continue
        speed, trials = amount(figures, key), figures.get("trials(s)")
        call = Call(
            f"{pass_}, {setting}",
            keys,
            config["impl"].text(),
            decode,
            figures["time(s)"].amount(),
            amount(figures, "time_p20(s)"),
            amount(figures, "time_p80(s)"),
            speed * BOUNDS[bound][1] if speed is not None else None,
            quotient(speed, _roofline(entry, bound)),
            amount(figures if PEAK_MEMORY in figures.dict() else entry, PEAK_MEMORY),
            amount(figures, HELD),
            [time for trial in trials.items() if (time := trial.amount()) is not None] if trials else [],
        )
        calls.append(call)
    return calls


def _setting(config: Node, queries: str) -> str:
    """`14/2x64, float32, causal, prefill, batch size 1`."""
    heads: dict[str, Any] = {key: config[key].count() for key in ("num_heads", "num_kv_heads", "head_dim")}
    bits, window = config.get("kv_bits"), config.get("window")
    stored = storage({"dtype": config["dtype"].text(), "kv_bits": bits.count() if bits else None})
    seen = f"window {window.count():,}" if window else "causal" if config["causal"].flag() else "not causal"
    return f"{shape(heads)}, {stored}, {seen}, {queries}, batch size {config['batch_size'].count()}"


def _all(panel: Contests) -> list[Call]:
    return [call for calls in panel.values() for call in calls.values()]


def _table(title: str, panel: Contests) -> Html:
    speed = ["K/V GB/s", "of reads"] if _all(panel)[0].decode else ["GFLOP/s", "of peak"]
    return table(
        title,
        ["keys, implementation", "time", "20th to 80th percentile", *speed, "flash is", "memory"],
        [
            [
                f"{units.whole(call.keys)}, {call.impl}",
                figure(call.seconds, units.seconds),
                [figure(call.low, units.seconds), " to ", figure(call.high, units.seconds)],
                figure(call.speed, units.rate),
                figure(call.share, units.share),
                _faster(panel[call.keys].get("flash"), call),
                figure(call.memory, units.megabytes),
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
    return Ratio.of(quotient(other.seconds, flash.seconds), other.trials, flash.trials)


def _comparisons(calls: dict[str, Call]) -> list[Comparison]:
    flash = calls.get("flash")
    return [
        Comparison(
            flash.panel.split(",")[0],
            other.impl,
            _speed(flash, other),
            Ratio(quotient(flash.memory, other.memory), apart=True),
        )
        for other in calls.values()
        if flash and other is not flash
    ]


def _charts(panel: Contests) -> list[Chart]:
    calls = _all(panel)
    by_impl = run.grouped(calls, lambda call: call.impl)
    decode = calls[0].decode

    def lines(at: Callable[[Call], Point | None]) -> list[Line]:
        return [(impl, LOOKS.get(impl, "other"), [at(call) for call in of_impl]) for impl, of_impl in by_impl.items()]

    held = {each.keys: each.held for each in calls if each.held is not None}
    reference = ("inputs and outputs", "bound", [point(keys, megabytes) for keys, megabytes in held.items()])
    if any(each.share is not None for each in calls):
        title = "Share of what the machine reads" if decode else "Share of the machine's peak"
        speed = chart.chart(title, SHARE, "keys", lines(lambda call: point(call.keys, call.share)))
    else:
        title = "Keys and values read, GB/s" if decode else "GFLOP/s"
        speed = chart.chart(title, SPEED, "keys", lines(lambda call: point(call.keys, call.speed)))
    memory = lines(lambda call: point(call.keys, call.memory))
    return [
        chart.chart("Time of a call", chart.TIME, "keys", lines(_time)),
        chart.chart("Memory of a call", chart.MEMORY, "keys", [*memory, reference]),
        speed,
    ]


def _time(call: Call) -> Point | None:
    return point(call.keys, call.seconds, call.low, call.high)
