"""Describes the result of `finetune`: its table and charts."""

from collections.abc import Sequence

from flash_evals.pages import chart, units
from flash_evals.pages.chart import Chart, Point, by_arm
from flash_evals.pages.description import Comparison, Description, Table
from flash_evals.pages.units import figure
from flash_evals.results.arms import ARMS
from flash_evals.results.finetune_result import Length, Result


def description(result: Result) -> Description:
    lengths, device = result.results, result.machine.device
    head = ["tokens", "patch", "step", "tokens/s", "peak memory", "loss", "steps"]
    rows = [row for length in lengths for row in _rows(length)]
    skipped = [f"Skipped {length.reason}." for length in result.skipped]
    return Description(
        result,
        [result.subject, "off and on taking turns", device],
        [Table("A training step, patch off and on", head, rows, names=(1, 1))],
        [f"flash: {result.flash}", *result.machine.bounds, *skipped],
        bool(result.flash.calls),
        "steps" if result.interrupted else "",
        command="finetune",
        title=result.model.name,
        charts=[("", charts(result))],
        comparisons=[Comparison("steps", "off", length.speed, length.memory) for length in lengths],
        about={"model": result.model, "settings": result.settings, "machine": result.machine},
    )


def _rows(length: Length) -> list[Sequence[str]]:
    """One row for each arm, and one that compares them."""
    tokens, steps = units.whole(length.seq_len), str(len(length.trials))
    off_and_on: list[Sequence[str]] = [
        [
            tokens,
            name,
            units.duration(arm.seconds, arm.seconds_p20, arm.seconds_p80),
            figure(arm.tokens_per_s, units.rate),
            figure(arm.peak_memory_mb, units.megabytes),
            figure(arm.loss, units.decimal(6), units.NOT_FINITE),
            steps,
        ]
        for name in ARMS
        for arm in [length[name]]
    ]
    ratios = [units.ratio(each) for each in (length.time, length.speed, length.memory)]
    loss = f"max |Δ| {figure(length.max_abs_dloss, units.scientific, units.NOT_FINITE)}"
    return [*off_and_on, [tokens, "on/off", *ratios, loss, ""]]


def charts(result: Result) -> list[Chart]:
    lengths = result.results
    spread = ("seconds", "seconds_p20", "seconds_p80")
    times = by_arm(lambda arm: [Point(n.seq_len, *(getattr(n[arm], key) for key in spread)) for n in lengths])
    memory = by_arm(lambda arm: [Point(n.seq_len, n[arm].peak_memory_mb) for n in lengths])
    return [
        Chart("Time of a step", chart.TIME, "tokens in a sequence", times),
        Chart("Peak memory of a step", chart.MEMORY, "tokens in a sequence", memory),
    ]
