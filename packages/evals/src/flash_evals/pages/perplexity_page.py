"""Describes the result of `perplexity`: its table and notes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flash_evals.pages import units
from flash_evals.pages.description import Comparison, Description, Table
from flash_evals.pages.units import NOT_FINITE, figure
from flash_evals.results import claims
from flash_evals.results.arms import ARMS, Measurement
from flash_evals.results.claims import percentile
from flash_evals.results.perplexity_result import Column, Name, Paired, Result

RATIOS: tuple[Literal["tokens_per_s"], Literal["peak_memory_mb"]] = ("tokens_per_s", "peak_memory_mb")
PARTS = ("model", "dataset", "settings", "windows", "ranks", "machine", "compared")


def description(result: Result) -> Description:
    dataset, windows = result.dataset, result.windows
    fingerprint = f"text {dataset.fingerprint.removeprefix('sha256:')[:8]}"
    text = ", ".join(filter(None, (dataset.name, dataset.revision, fingerprint)))
    finished = f"{windows.finished:,} of {windows.planned:,} windows"
    speed, memory = (result.ratio(key) for key in RATIOS)
    return Description(
        result,
        [result.model.title, text, str(result.settings), f"{result.tokens:,} tokens", result.machine.device],
        [_table(result)],
        _notes(result),
        bool(result.flash.calls) or not result.on,
        finished if result.interrupted else "",
        command="perplexity",
        title=f"{result.model.name} on {dataset.name}, context {result.settings.context:,}",
        comparisons=[Comparison("prefill", "off", speed, memory)] if _of_the_patch(result) else [],
        about={part: getattr(result, part) for part in PARTS},
    )


def _of_the_patch(result: Result) -> bool:
    """Whether the two columns are patch off and patch on, and their runs differ in nothing else."""
    return tuple(result.columns) == ARMS and not (result.compared and result.compared.differs_in)


def _table(result: Result) -> Table:
    """A column for each arm and, if there are two, one for their difference."""
    speed, together, ranks = "prefill tokens/s", [], result.ranks.size
    if ranks > 1:
        speed, together = f"{speed}, each rank", [f"{ranks} ranks together"]
    names: list[str] = ["", "token perplexity", "word / byte perplexity", "bits per byte", speed, *together]
    columns = [[*names, "peak memory"], *(_column(result, name) for name in result.columns)]
    if result.paired:
        error = figure(result.paired.delta_nll_se, units.scientific)
        delta = f"ΔNLL {figure(result.paired.delta_nll, units.signed)} ± {error}"
        faster, memory = (units.ratio(result.ratio(key)) for key in RATIOS)
        columns.append(["difference", delta, "", "", faster, *("" for _ in together), memory])
    head, *rows = zip(*columns, strict=True)
    return Table("Perplexity, prefill speed and peak memory", head, rows)


def _column(result: Result, name: Name) -> list[str]:
    column, ranks = result.columns[name], result.ranks
    of_file = result.compared if result.compared and name == result.compared.column else None
    two, three, four = map(units.decimal, (2, 3, 4))
    together: dict[Name, float] = dict(ranks.tokens_per_s.items()) if ranks.size > 1 else {}
    return [
        f"patch {name}" if not of_file else f"patch {of_file.arm}, {Path(of_file.file).name}",
        f"{figure(column.ppl, four, NOT_FINITE)} ± {figure(column.ppl_se, two, NOT_FINITE)}",
        f"{figure(column.word_ppl, three)} / {figure(column.byte_ppl, four)}",
        figure(column.bits_per_byte, four),
        _speed(column, result.trials_of(name)),
        *([figure(together.get(name), units.rate, "")] if ranks.size > 1 else []),
        figure(column.peak_memory_mb, units.megabytes),
    ]


def _speed(column: Column, trials: Sequence[Measurement]) -> str:
    """Median of the batches, and the range from the 20th to the 80th percentile."""
    median, speeds = figure(column.tokens_per_s, units.rate), [trial.tokens_per_s for trial in trials]
    if not speeds:
        return median
    low, high = (units.rate(percentile(speeds, share)) for share in (0.2, 0.8))
    return f"{median} ({low}–{high})"


def _notes(result: Result) -> list[str]:
    paired, compared, resumed = result.paired, result.compared, result.windows.resumed
    agreement = []
    if paired:
        agreement = [
            f"top-1 agreement {figure(paired.top1_agreement, units.percent)}",
            f"max |Δlogit| {figure(paired.max_abs_dlogit, units.scientific)}",
            f"mean KL {figure(paired.mean_kl, units.scientific)}",
        ]
    if result.on:
        agreement.append(f"flash: {result.flash}")
    notes = [" · ".join(agreement)] if agreement else []
    if compared:
        file, same = Path(compared.file).name, "have the same model, machine, versions and batch size"
        differs = f"{file} differs from this run: {'; '.join(compared.differs_in)}"
        notes.append(differs if compared.differs_in else f"{file} and this run {same}")
    if resumed:
        notes.append(f"{resumed:,} windows are from an earlier run that this one resumed.")
    return [*notes, *_verdict(result), *result.machine.bounds]


def _verdict(result: Result) -> list[str]:
    """Returns one sentence that sums up the result, or none if the patch was on but never ran."""
    if result.on and not result.flash.calls:
        return []
    if not result.paired:
        return ["Only one arm ran: there is nothing to compare."]
    same, sentence = predictions(result, result.paired)
    if same is None:
        return [f"Not comparable: {sentence}."]
    said = "Same predictions" if same else f"Predictions differ: {sentence}"
    speed, memory = (result.ratio(key) for key in RATIOS)
    claimed = claims.sentence({"speed": speed, "memory": memory})
    return ["; ".join(filter(None, (said, claimed))) + "."]


def predictions(result: Result, paired: Paired) -> tuple[bool | None, str]:
    """Whether both arms' predictions are the same (None: unknown), and a sentence with the reason."""
    # If one arm comes from a --compare file, the difference of the arms' logits is unknown.
    known = [paired.delta_nll, *([] if result.compared else [paired.max_abs_dlogit])]
    if not all(figure is not None and math.isfinite(figure) for figure in known):
        return None, "some logits are not finite numbers"
    differ = round((1 - paired.top1_agreement) * result.tokens)
    first = f"another token ranks first at {differ:,} of {result.tokens:,} positions"
    if paired.top1_agreement == 1:
        first = f"the same token ranks first at all {result.tokens:,} positions"
    return paired.same, f"{first}, ΔNLL {figure(paired.delta_nll, units.signed)}"
