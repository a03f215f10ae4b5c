"""The result of `flash-eval perplexity` as a page of text."""

import math
from pathlib import Path

import numpy as np

from flash_evals import claims, output
from flash_evals.output import Table
from flash_evals.perplexity_result import Compared, Name, Result


def render(result: Result, table: Table = output.columns) -> str:
    columns, compared, paired = result.columns, result.compared, result.paired
    arms = columns.values()
    fingerprint = result.dataset.fingerprint.removeprefix("sha256:")[:8]
    header = " · ".join(
        [
            result.model.title,
            ", ".join(filter(None, (result.dataset.name, result.dataset.revision, f"text {fingerprint}"))),
            str(result.settings),
            f"{result.tokens:,} tokens",
            result.machine.device,
        ]
    )
    speeds = [output.spread([trial.tokens_per_s for trial in result.trials_of(name)]) for name in columns]
    delta = f"ΔNLL {paired.delta_nll:+.1e} ± {paired.delta_nll_se:.1e}" if paired else ""
    rows = [
        ("", *(_title(name, compared) for name in columns), "difference"),
        ("token perplexity", *(f"{output.plain(arm.ppl)} ± {output.plain(arm.ppl_se, 2)}" for arm in arms), delta),
        ("word / byte perplexity", *(f"{_known(arm.word_ppl, 3)} / {_known(arm.byte_ppl)}" for arm in arms), ""),
        ("bits per byte", *(_known(arm.bits_per_byte) for arm in arms), ""),
        ("prefill tokens/s", *speeds, str(result.ratio("tokens_per_s"))),
        ("peak memory", *(f"{arm.peak_memory_mb:,.1f} MB" for arm in arms), str(result.ratio("peak_memory_mb"))),
    ]
    if result.ranks.size > 1:
        sums: dict[Name, str] = {name: f"{speed:,.0f}" for name, speed in result.ranks.tokens_per_s.items()}
        rows[4] = ("prefill tokens/s, each rank", *rows[4][1:])
        rows.insert(5, (f"{result.ranks.size} ranks together", *(sums.get(name, "") for name in columns), ""))
    lines = [header, "", table(rows if paired else [row[:-1] for row in rows]), ""]
    if comparison := _comparison(result):
        lines.append(comparison)
    if compared:
        differs = "; ".join(compared.differs_in) or "nothing: the same model, machine, versions and batch size"
        lines.append(f"{Path(compared.file).name} differs in {differs}")
    lines.append(verdict(result))
    lines += result.machine.bounds
    if result.windows.resumed:
        lines.append(f"{result.windows.resumed:,} windows are from an earlier run.")
    if result.interrupted:
        finished, planned = result.windows.finished, result.windows.planned
        lines.append(f"Interrupted after {finished:,} of {planned:,} windows; the figures are of those.")
    return "\n".join(lines)


def _title(name: Name, compared: Compared | None) -> str:
    if compared and name == compared.column:
        return f"patch {compared.arm}, {Path(compared.file).name}"
    return f"patch {name}"


def _comparison(result: Result) -> str:
    """What the predictions have to do with each other, and what flash did, as far as there are two arms and flash."""
    parts = []
    if result.paired:
        parts += [
            f"top-1 agreement {_percent(result.paired.top1_agreement)} %",
            f"max |Δlogit| {_small(result.paired.max_abs_dlogit)}",
            f"mean KL {_small(result.paired.mean_kl)}",
        ]
    if result.on:
        parts.append(f"flash: {result.flash}")
    return " · ".join(parts)


def _known(x: float | None, digits: int = 4) -> str:
    return "–" if x is None else output.plain(x, digits)


def _small(x: float | None) -> str:
    return "–" if x is None else f"{x:.1e}"


def verdict(result: Result) -> str:
    """One sentence that is true of the figures above it."""
    if result.on and not result.flash.calls:
        which = "both columns are" if result.paired else "this is"
        return f"The patch never ran: {which} MLX's own attention."
    if not result.paired:
        return "One arm: nothing is compared."
    paired, tokens = result.paired, result.tokens
    if paired.delta_nll is None or not math.isfinite(paired.delta_nll) or not math.isfinite(paired.max_abs_dlogit or 0):
        return "Not comparable: there are logits that are no finite numbers."
    predictions = "Same predictions"
    if not paired.same:
        differ = round((1 - paired.top1_agreement) * tokens)
        predictions = f"Predictions differ: top-1 at {differ:,} of {tokens:,} tokens, ΔNLL {paired.delta_nll:+.1e}"
    ratios = {"speed": result.ratio("tokens_per_s"), "memory": result.ratio("peak_memory_mb")}
    return "; ".join(filter(None, (predictions, claims.sentence(ratios)))) + "."


def _percent(share: float) -> str:
    """Rounded down: 100.000 only if it is all of them."""
    return f"{np.floor(share * 1e5) / 1e3:.3f}"
