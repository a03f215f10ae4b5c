"""What `flash-eval kernels` found: the entries of its result file, and the page of text that is made of them.

An entry is one implementation on one problem, in one or more passes, and can be read without the others.
"""

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from flash_evals import claims, machine, output
from flash_evals.claims import Ratio
from flash_evals.contest import Contest
from flash_evals.contest import Entry as Measured
from flash_evals.output import Table
from flash_evals.workload import PASSES, Pass, Workload

Entry = dict[str, Any]

PEAK_MEMORY, HELD = "peak_memory_usage(MB)", "inputs_and_outputs(MB)"


def describe(contests: Iterable[Contest]) -> list[Entry]:
    """The implementations that have finished a trial. The passes of a problem follow each other."""
    groups = groupby(contests, key=lambda contest: contest.workload.describe())
    return [entry for _, group in groups for entry in _describe_problem(list(group))]


def _describe_problem(contests: Sequence[Contest]) -> list[Entry]:
    roofline = {
        "peak(TFLOPs/s)": _median([peak for contest in contests for peak in contest.peak_flops], 1e12),
        "read(GB/s)": _median([read for contest in contests for read in contest.bandwidth], 1e9),
    }
    by_impl: dict[str, dict[Pass, dict[str, Any]]] = {}
    for contest in contests:
        for name, entry in contest.entries.items():
            if entry.trials:
                by_impl.setdefault(name, {})[contest.workload.pass_] = _describe_pass(contest.workload, entry)
    return [
        {
            "config": {**contests[0].workload.describe(), "impl": name, "device": machine.kind()},
            **{pass_: passes.get(pass_, {}) for pass_ in PASSES},
            **{key: max(figures[key] for figures in passes.values()) for key in (PEAK_MEMORY, HELD)},
            "roofline": roofline,
        }
        for name, passes in by_impl.items()
    ]


def _describe_pass(workload: Workload, entry: Measured) -> dict[str, Any]:
    seconds = statistics.median(entry.trials)
    reading = {"read(GB/s)": workload.bytes_read / seconds / 1e9} if workload.pass_ == "forward" else {}
    return {
        "time(s)": seconds,
        "time_p20(s)": output.percentile(entry.trials, 0.2),
        "time_p80(s)": output.percentile(entry.trials, 0.8),
        "FLOPS(TFLOPs/s)": workload.flops / seconds / 1e12,
        **reading,
        PEAK_MEMORY: entry.peak_memory / 1e6,
        HELD: workload.bytes_held / 1e6,
        "trials(s)": entry.trials,
        "calls_per_trial": entry.calls,
    }


def _median(values: Sequence[float], unit: float) -> float | None:
    return statistics.median(values) / unit if values else None


def csv_rows(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """One row for each trial of each implementation and pass."""
    return [
        {**entry["config"], "pass": pass_, "trial": number, "time(s)": seconds}
        for entry in entries
        for pass_ in measured([entry])
        for number, seconds in enumerate(entry[pass_]["trials(s)"])
    ]


def measured(entries: Iterable[Entry]) -> list[Pass]:
    """The passes that some entry has."""
    entries = list(entries)
    return [pass_ for pass_ in PASSES if any(entry[pass_] for entry in entries)]


def by_workload(entries: Iterable[Entry]) -> list[dict[str, Entry]]:
    """For each workload the entries by implementation, in the order in which they were measured."""
    groups = groupby(entries, key=lambda entry: {**entry["config"], "impl": None})
    return [{entry["config"]["impl"]: entry for entry in group} for _, group in groups]


def render(entries: Sequence[Entry], table: Table = output.columns) -> str:
    """The result as a page of text."""
    contests = by_workload(entries)
    passes = measured(entries)
    rows = [_titles(entries[0], passes)]
    rows += [row for contest in contests for row in _rows(contest, passes)]
    closing = _closing(contests, passes)
    if entries[0]["settings"]["interrupted"]:
        closing.append("Interrupted; the figures are of the trials that were finished.")
    return "\n".join([_header(entries), "", table(rows), *(["", *closing] if closing else [])])


def _header(entries: Sequence[Entry]) -> str:
    rooflines = [entry["roofline"] for entry in entries]
    bounds = [
        _range("peak", [1000 * bound["peak(TFLOPs/s)"] for bound in rooflines if bound["peak(TFLOPs/s)"]], "GFLOP/s"),
        _range("reads", [bound["read(GB/s)"] for bound in rooflines if bound["read(GB/s)"]], "GB/s"),
    ]
    parts = (kind(entries), entries[0]["machine"]["device"], ", ".join(filter(None, bounds)))
    return " · ".join(filter(None, parts))


def kind(entries: Sequence[Entry]) -> str:
    """What all workloads of a run share."""
    config, passes = entries[0]["config"], measured(entries)
    what = "attention" if len(passes) > 1 else f"attention {passes[0]}"
    visible = f"window {config['window']}" if config["window"] else "causal" if config["causal"] else "not causal"
    return f"{what}, {visible}, batch size {config['batch_size']}"


def _range(name: str, values: Sequence[float], unit: str) -> str:
    """`peak 127–129 GFLOP/s`; empty if nothing was measured."""
    if not values:
        return ""
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return f"{name} {low if low == high else f'{low}–{high}'} {unit}"


def _titles(entry: Entry, passes: Sequence[Pass]) -> list[str]:
    shared = ["shape", "dtype", "queries", "keys", *(["pass"] if len(passes) > 1 else [])]
    unit = ("K/V GB/s", "of reads") if is_decode(entry) else ("GFLOP/s", "of peak")
    return [*shared, "impl", "time", *unit, "flash is", "memory", "trials"]


def is_decode(entry: Entry) -> bool:
    return bool(entry["config"]["query_len"] == 1)


def _rows(contest: dict[str, Entry], passes: Sequence[Pass]) -> list[list[str]]:
    """One for each pass and implementation; what they share stands in the first."""
    config = next(iter(contest.values()))["config"]
    problem = [shape(config), storage(config), f"{config['query_len']:,}", f"{config['seq_len']:,}"]
    rows: list[list[str]] = []
    for pass_ in passes:
        shared = [*problem, *([pass_] if len(passes) > 1 else [])]
        if rows:
            shared[: len(problem)] = [""] * len(problem)
        for name, entry in contest.items():
            if entry[pass_]:
                rows.append([*shared, name, *_figures(entry, pass_, ratio(contest, name, pass_))])
                shared = [""] * len(shared)
    return rows


def _figures(entry: Entry, pass_: Pass, against_flash: Ratio | None) -> list[str]:
    trials = entry[pass_]["trials(s)"]
    return [
        output.duration(trials),
        f"{speed(entry, pass_):,.1f}",
        _share(entry, pass_),
        _faster(against_flash),
        f"{entry[pass_][PEAK_MEMORY]:,.1f} MB",
        str(len(trials)),
    ]


def storage(config: dict[str, Any]) -> str:
    """`bfloat16`, `bfloat16, 8-bit K/V`."""
    bits = config["kv_bits"]
    return f"{config['dtype']}, {bits}-bit K/V" if bits else str(config["dtype"])


def shape(config: dict[str, Any]) -> str:
    return f"{config['num_heads']}/{config['num_kv_heads']}x{config['head_dim']}"


def speed(entry: Entry, pass_: Pass) -> float:
    """GFLOP/s; GB/s of keys and values for a decode step, which reading bounds."""
    figures = entry[pass_]
    return float(figures["read(GB/s)"] if is_decode(entry) else 1000 * figures["FLOPS(TFLOPs/s)"])


def speed_bound(entry: Entry) -> float | None:
    """What the machine reached beside it, in the same unit; None if that was not measured."""
    roofline = entry["roofline"]
    bound = roofline["read(GB/s)"] if is_decode(entry) else roofline["peak(TFLOPs/s)"]
    return bound and float(bound if is_decode(entry) else 1000 * bound)


def _share(entry: Entry, pass_: Pass) -> str:
    bound = speed_bound(entry)
    if not bound:
        return ""
    share = speed(entry, pass_) / bound
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def ratio(contest: dict[str, Entry], name: str, pass_: Pass) -> Ratio | None:
    """The time of that implementation over flash's; None of flash itself, and if one of them did not take part."""
    if name == "flash" or not all(each in contest and contest[each][pass_] for each in (name, "flash")):
        return None
    other, flash = (contest[each][pass_] for each in (name, "flash"))
    return Ratio.of(other["time(s)"] / flash["time(s)"], other["trials(s)"], flash["trials(s)"])


def _faster(times: Ratio | None) -> str:
    if times is None or times.value is None:
        return ""
    words = {1: f"{claims.times(times.value)} faster", -1: f"{claims.times(1 / times.value)} slower"}
    return words.get(times.sign or 0, claims.NOTHING)


def _closing(contests: Sequence[dict[str, Entry]], passes: Sequence[Pass]) -> list[str]:
    """For each implementation and pass that has several ratios to flash: their geometric mean and range."""
    lines = []
    for pass_ in passes:
        for name in dict.fromkeys(name for contest in contests for name in contest):
            ratios = [times for contest in contests if (times := ratio(contest, name, pass_)) is not None]
            if len(ratios) > 1:
                who = f"{name}, {pass_}" if len(passes) > 1 else name
                values = [each.value for each in ratios if each.value is not None]
                spread = f"{claims.times(min(values))}–{claims.times(max(values))} over {len(values)} shapes"
                if unclear := sum(each.sign == 0 for each in ratios):
                    spread += f", {claims.NOTHING} in {unclear}"
                lines.append(f"flash against {who}: {claims.times(statistics.geometric_mean(values))} ({spread})")
    return lines
