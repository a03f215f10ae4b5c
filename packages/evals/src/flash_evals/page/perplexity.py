"""What `perplexity` found, described."""

import math
from collections.abc import Sequence
from pathlib import Path

from flash_evals import claims
from flash_evals.measure import ARMS
from flash_evals.output import percentile
from flash_evals.page import chart, units
from flash_evals.page.chart import Chart, Point, Series
from flash_evals.page.description import Comparison, Description, Table
from flash_evals.page.model import arms, grouped, warnings
from flash_evals.page.units import NOT_FINITE, Cell, figure
from flash_evals.perplexity_result import Column, Name, Paired, Result

PARTS = ("model", "dataset", "settings", "windows", "ranks", "machine", "compared")


def description(result: Result) -> Description:
    dataset, windows = result.dataset, result.windows
    fingerprint = f"text {dataset.fingerprint.removeprefix('sha256:')[:8]}"
    text = ", ".join(filter(None, (dataset.name, dataset.revision, fingerprint)))
    warned = warnings(result, f"{windows.finished:,} of {windows.planned:,} windows", patched=result.on is not None)
    speed, memory = result.ratio("tokens_per_s"), result.ratio("peak_memory_mb")
    return Description(
        result,
        [result.model.title, text, str(result.settings), f"{result.tokens:,} tokens", result.machine.device],
        [_table(result)],
        _notes(result),
        warned,
        command="perplexity",
        title=f"{result.model.name} on {dataset.name}, context {result.settings.context:,}",
        comparisons=[Comparison("prefill", "off", speed, memory)] if _of_the_patch(result) else [],
        about={part: getattr(result, part) for part in PARTS},
    )


def _of_the_patch(result: Result) -> bool:
    """Whether the patch is all that its two columns differ in."""
    return tuple(result.columns) == ARMS and not (result.compared and result.compared.differs_in)


def _table(result: Result) -> Table:
    """With a column for the difference of two."""
    columns = list(result.columns.values())
    paired, ranks = result.paired, result.ranks
    delta: Cell = ""
    if paired:
        error = figure(paired.delta_nll_se, units.scientific)
        delta = ["ΔNLL ", figure(paired.delta_nll, units.signed), " ± ", error]
    per = units.decimal(4)
    speeds = [_speed(result, name) for name in result.columns]
    memory = [figure(column.peak_memory_mb, units.megabytes) for column in columns]
    rows: list[Sequence[Cell]] = [
        ["token perplexity", *map(_with_error, columns), delta],
        [
            "word / byte perplexity",
            *([figure(column.word_ppl, units.decimal(3)), " / ", figure(column.byte_ppl, per)] for column in columns),
            "",
        ],
        ["bits per byte", *(figure(column.bits_per_byte, per) for column in columns), ""],
        ["prefill tokens/s", *speeds, units.ratio(result.ratio("tokens_per_s"))],
        ["peak memory", *memory, units.ratio(result.ratio("peak_memory_mb"))],
    ]
    if ranks.size > 1:
        sums: dict[Name, float] = dict(ranks.tokens_per_s.items())
        rows[3] = ["prefill tokens/s, each rank", *rows[3][1:]]
        rows.insert(
            4, [f"{ranks.size} ranks together", *(figure(sums.get(n), units.rate, "") for n in result.columns), ""]
        )
    head = ["", *(_title(result, name) for name in result.columns), *(["difference"] if paired else [])]
    return Table("Perplexity, prefill speed and peak memory", head, [row[: len(head)] for row in rows])


def _title(result: Result, name: Name) -> str:
    compared = result.compared
    if compared and name == compared.column:
        return f"patch {compared.arm}, {Path(compared.file).name}"
    return f"patch {name}"


def _with_error(arm: Column) -> Cell:
    error = figure(arm.ppl_se, units.decimal(2), NOT_FINITE)
    return [figure(arm.ppl, units.decimal(4), NOT_FINITE), " ± ", error]


def _speed(result: Result, name: Name) -> Cell:
    """Median of the batches, and the range from the 20th to the 80th percentile."""
    median = figure(result.columns[name].tokens_per_s, units.rate)
    speeds = [trial.tokens_per_s for trial in result.trials_of(name)]
    if not speeds:
        return median
    low, high = (units.rate(percentile(speeds, share)) for share in (0.2, 0.8))
    return [median, f" ({low}–{high})"]


def _notes(result: Result) -> list[Cell]:
    paired, compared, resumed = result.paired, result.compared, result.windows.resumed
    agreement: list[str] = []
    if paired:
        agreement = [
            *("top-1 agreement ", figure(paired.top1_agreement, units.percent)),
            *(" · max |Δlogit| ", figure(paired.max_abs_dlogit, units.scientific)),
            *(" · mean KL ", figure(paired.mean_kl, units.scientific)),
        ]
    if result.on:
        agreement += [" · "] * bool(paired) + [f"flash: {result.flash}"]
    notes: list[Cell] = [agreement] if agreement else []
    if compared:
        differs = "; ".join(compared.differs_in) or "nothing: the same model, machine, versions and batch size"
        notes.append(f"{Path(compared.file).name} differs in {differs}")
    if resumed:
        notes.append(f"{resumed:,} windows are from an earlier run.")
    return [*notes, *result.machine.bounds, *_verdict(result)]


def _verdict(result: Result) -> list[str]:
    """One sentence that is true of the figures above it; none where they say nothing about flash."""
    if result.on and not result.flash.calls:
        return []
    if not result.paired:
        return ["One arm: nothing is compared."]
    same, sentence = predictions(result, result.paired)
    if same is None:
        return [f"Not comparable: {''.join(sentence)}."]
    said = "Same predictions" if same else f"Predictions differ: {''.join(sentence)}"
    ratios = {"speed": result.ratio("tokens_per_s"), "memory": result.ratio("peak_memory_mb")}
    return ["; ".join(filter(None, (said, claims.sentence(ratios)))) + "."]


def predictions(result: Result, paired: Paired) -> tuple[bool | None, Cell]:
    """Whether they are the same, as far as that is known, and what is said of it."""
    # The logits of arms that did not run together are not known.
    known = [paired.delta_nll, *([] if result.compared else [paired.max_abs_dlogit])]
    if not all(figure is not None and math.isfinite(figure) for figure in known):
        return None, "there are logits that are no finite numbers"
    differ = round((1 - paired.top1_agreement) * result.tokens)
    first = f"another token ranks first at {differ:,} of {result.tokens:,}, ΔNLL "
    return paired.same, [first, figure(paired.delta_nll, units.signed)]


def against_context(results: Sequence[Result]) -> list[tuple[str, list[Chart]]]:
    """Speed and memory against the context, of runs that share the rest: where they have several."""
    rows = []
    for shared, of_group in grouped(filter(_of_the_patch, results), _shared).items():
        by_context = {result.settings.context: result for result in of_group}
        if len(by_context) > 1:
            rows.append((shared, _charts(by_context)))
    return rows


def _shared(result: Result) -> str:
    ways = f"{result.settings.scoring} scoring, {result.settings.documents} documents"
    batch = f"batch size {result.settings.batch_size:,}"
    return " · ".join([result.model.title, result.dataset.name, ways, batch, result.machine.device])


def _charts(by_context: dict[int, Result]) -> list[Chart]:
    def lines(key: str) -> list[Series]:
        return arms(lambda arm: [Point(n, getattr(each.columns[arm], key)) for n, each in by_context.items()])

    return [
        Chart("Prefill: tokens per second", chart.SPEED, "context in tokens", lines("tokens_per_s")),
        Chart("Peak memory of a batch", chart.MEMORY, "context in tokens", lines("peak_memory_mb")),
    ]
