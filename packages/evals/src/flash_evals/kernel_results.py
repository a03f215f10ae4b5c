"""What `flash-eval kernels` found: the entries of its result file, and the page of text that is made of them.

An entry is one implementation on one workload, and can be read without the others.
"""

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from flash_evals import machine, report
from flash_evals.contest import Contest

Entry = dict[str, Any]


def describe(contest: Contest) -> list[Entry]:
    """The implementations that have finished a trial."""
    workload = contest.workload
    roofline = {
        "peak(TFLOPs/s)": _median(contest.peak_flops, 1e12),
        "read(GB/s)": _median(contest.read_bandwidth, 1e9),
    }
    finished = {name: entry for name, entry in contest.entries.items() if entry.trials}
    medians = {name: statistics.median(entry.trials) for name, entry in finished.items()}
    return [
        {
            "config": {**workload.describe(), "impl": name, "device": machine.kind()},
            "forward": {
                "time(s)": medians[name],
                "time_p20(s)": report.percentile(entry.trials, 0.2),
                "time_p80(s)": report.percentile(entry.trials, 0.8),
                "FLOPS(TFLOPs/s)": workload.flops / medians[name] / 1e12,
                "read(GB/s)": workload.bytes_read / medians[name] / 1e9,
                "trials(s)": entry.trials,
                "calls_per_trial": entry.calls,
            },
            "backward": {},
            "forward_backward": {},
            "peak_memory_usage(MB)": entry.peak_memory / 1e6,
            "inputs_and_outputs(MB)": workload.bytes_held / 1e6,
            "roofline": roofline,
        }
        for name, entry in finished.items()
    ]


def _median(values: Sequence[float], unit: float) -> float | None:
    return statistics.median(values) / unit if values else None


def csv_rows(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """One row for each trial of each implementation."""
    return [
        {**entry["config"], "trial": number, "time(s)": seconds}
        for entry in entries
        for number, seconds in enumerate(entry["forward"]["trials(s)"])
    ]


def by_workload(entries: Iterable[Entry]) -> list[dict[str, Entry]]:
    """For each workload the entries by implementation, in the order in which they were measured."""
    groups = groupby(entries, key=lambda entry: {**entry["config"], "impl": None})
    return [{entry["config"]["impl"]: entry for entry in group} for _, group in groups]


def render(entries: Sequence[Entry]) -> str:
    """The result as a page of text."""
    contests = by_workload(entries)
    rows = [_titles(entries[0])]
    rows += [row for contest in contests for row in _rows(contest)]
    lines = [_header(entries), "", report.columns(rows, gap=3)]
    if closing := _closing(contests):
        lines += ["", *closing]
    if entries[0]["settings"]["interrupted"]:
        lines.append("Interrupted; the figures are of the trials that were finished.")
    return "\n".join(lines)


def _header(entries: Sequence[Entry]) -> str:
    rooflines = [entry["roofline"] for entry in entries]
    bounds = [
        _range("peak", [1000 * bound["peak(TFLOPs/s)"] for bound in rooflines if bound["peak(TFLOPs/s)"]], "GFLOP/s"),
        _range("reads", [bound["read(GB/s)"] for bound in rooflines if bound["read(GB/s)"]], "GB/s"),
    ]
    parts = (kind(entries[0]["config"]), entries[0]["machine"]["device"], ", ".join(filter(None, bounds)))
    return " · ".join(filter(None, parts))


def kind(config: dict[str, Any]) -> str:
    """What all workloads of a run share."""
    visible = f"window {config['window']}" if config["window"] else "causal" if config["causal"] else "not causal"
    return f"attention forward, {visible}, batch size {config['batch_size']}"


def _range(name: str, values: Sequence[float], unit: str) -> str:
    """`peak 127–129 GFLOP/s`; empty if nothing was measured."""
    if not values:
        return ""
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return f"{name} {low if low == high else f'{low}–{high}'} {unit}"


def _titles(entry: Entry) -> tuple[str, ...]:
    unit = ("K/V GB/s", "of reads") if is_decode(entry) else ("GFLOP/s", "of peak")
    return ("shape", "dtype", "queries", "keys", "impl", "time", *unit, "flash is", "memory", "trials")


def is_decode(entry: Entry) -> bool:
    return bool(entry["config"]["query_len"] == 1)


def _rows(contest: dict[str, Entry]) -> list[tuple[str, ...]]:
    """One for each implementation; what they share stands in the first."""
    config = next(iter(contest.values()))["config"]
    shared = (shape(config), config["dtype"], f"{config['query_len']:,}", f"{config['seq_len']:,}")
    return [
        (
            *(("",) * len(shared) if number else shared),
            name,
            report.duration(entry["forward"]["trials(s)"]),
            f"{speed(entry):,.1f}",
            _share(entry),
            _faster(ratio(contest, name)),
            f"{entry['peak_memory_usage(MB)']:,.1f} MB",
            str(len(entry["forward"]["trials(s)"])),
        )
        for number, (name, entry) in enumerate(contest.items())
    ]


def shape(config: dict[str, Any]) -> str:
    return f"{config['num_heads']}/{config['num_kv_heads']}x{config['head_dim']}"


def speed(entry: Entry) -> float:
    """GFLOP/s; GB/s of keys and values for a decode step, which reading bounds."""
    forward = entry["forward"]
    return float(forward["read(GB/s)"] if is_decode(entry) else 1000 * forward["FLOPS(TFLOPs/s)"])


def speed_bound(entry: Entry) -> float | None:
    """What the machine reached beside it, in the same unit; None on a GPU."""
    roofline = entry["roofline"]
    bound = roofline["read(GB/s)"] if is_decode(entry) else roofline["peak(TFLOPs/s)"]
    return bound and float(bound if is_decode(entry) else 1000 * bound)


def _share(entry: Entry) -> str:
    bound = speed_bound(entry)
    if not bound:
        return ""
    share = speed(entry) / bound
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def ratio(contest: dict[str, Entry], name: str) -> float | None:
    """The time of that implementation over flash's; None of flash itself, and if flash did not take part."""
    if name == "flash" or "flash" not in contest:
        return None
    seconds, flash = (contest[each]["forward"]["time(s)"] for each in (name, "flash"))
    return float(seconds / flash)


def _faster(times: float | None) -> str:
    if times is None:
        return ""
    return f"{times:,.2f}x faster" if times >= 1 else f"{1 / times:,.2f}x slower"


def _closing(contests: Sequence[dict[str, Entry]]) -> list[str]:
    """For each implementation that has several ratios to flash: their geometric mean and range."""
    lines = []
    for name in dict.fromkeys(name for contest in contests for name in contest):
        ratios = [times for contest in contests if name in contest and (times := ratio(contest, name)) is not None]
        if len(ratios) > 1:
            spread = f"{min(ratios):,.2f}x–{max(ratios):,.2f}x over {len(ratios)} shapes"
            lines.append(f"flash against {name}: {statistics.geometric_mean(ratios):,.2f}x ({spread})")
    return lines
