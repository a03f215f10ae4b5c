"""`flash-eval perplexity`: one model reads one text twice, patch off and on, and every difference is shown.

`command` reads the options, `paired.measured` does the work batch by batch, `summary` makes the contents of a
result file of it, `render` the page that people read.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import click
import numpy as np

from flash_evals import data, machine, models, options, output, paired, scoring
from flash_evals.errors import EvalError
from flash_evals.measure import ARMS, Flash, memory_method
from flash_evals.output import Outputs, Table

SAME_NLL = 1e-4  # nats; a mean ΔNLL within this, and top-1 agreement everywhere, is called "same predictions"


@click.command("perplexity")
@options.model
@options.adapter_path
@click.option(
    "--dataset",
    default=["pydoc"],
    show_default=True,
    multiple=True,
    metavar="NAME",
    help="pydoc (documentation that CPython carries); wikitext, wikitext-2 or wikitext-103 (of Salesforce/wikitext, "
    "the raw-v1 configurations; wikitext is wikitext-2); a .txt, .jsonl or .parquet file, or several, each behind a "
    "--dataset; a folder of files of one kind; - for a text on stdin; or any hub id.",
)
@click.option("--config", help="Configuration of a hub dataset, as the hub names it.")
@click.option("--split", help="Split of a hub dataset or a folder.  [default: test]")
@click.option("--text-column", "column", help="Column that holds the text.  [default: text]")
@click.option("--dataset-revision", help="Branch, tag or commit of a hub dataset.  [default: main]")
@click.option(
    "--context",
    default=256,
    show_default=True,
    callback=options.at_least(2),
    help="Tokens the model reads in one window.",
)
@click.option(
    "--stride",
    type=int,
    help="Tokens from one window to the next. Less than the context: tokens are scored with more text before "
    "them, and it takes longer.  [default: the context]",
)
@click.option(
    "--batch-size",
    default=4,
    show_default=True,
    callback=options.at_least(1),
    help="Windows read at once. Speed and memory depend on it, the scores do not.",
)
@click.option("--max-windows", type=int, callback=options.at_least(1), help="Stop after this many windows.")
@options.outputs
def command(
    model: str | None,
    revision: str | None,
    adapter_path: str | None,
    dataset: tuple[str, ...],
    config: str | None,
    split: str | None,
    column: str | None,
    dataset_revision: str | None,
    context: int,
    stride: int | None,
    batch_size: int,
    max_windows: int | None,
    outputs: Outputs,
) -> None:
    """Perplexity, speed and memory of a model, patch off against patch on.

    Both arms read the same batches, taking turns in going first; a window to warm up is not counted.

    \b
    token perplexity   exp of the mean cost of a token, -ln p. ±: standard error
                       of that mean, tokens taken as independent: a lower bound
    word / byte        the same cost per word (split at white space) and per byte
                       (UTF-8) of the original text, for comparing models whose
                       tokenizers differ
    ΔNLL               on minus off, mean over the tokens ± its standard error
    prefill tokens/s   median of the batches (20th to 80th percentile)
    peak memory        what a batch needs on top of the loaded model, at most
    top-1 agreement    tokens where both arms rank the same one first, or tied
    max |Δlogit|       largest difference of any logit at any scored token
    mean KL            KL(off || on) of the predicted distributions, in nats

    "Same predictions" is said if top-1 agrees everywhere and ΔNLL is within 1e-4.

    Each token is scored once, except the first if the model's tokenizer sets no BOS before it. Documents are
    joined by a blank line. Ctrl-C ends the run and reports the batches that are finished.
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise EvalError(f"--stride must be between 1 and the context of {context}, not {stride}")
    described_machine = machine.describe()
    text = data.load(*dataset, config=config, split=split, column=column, revision=dataset_revision)
    loaded = models.load(model, revision, adapter_path)
    loaded.require_positions(context, "--context")
    tokens = models.encode(loaded, text.text)
    if len(tokens.ids) < 2:
        raise EvalError(f"{text.name} has {len(tokens.ids)} tokens for this model; scoring one takes two")
    plan = scoring.windows(len(tokens.ids), context, stride)[:max_windows]

    batches: list[paired.Batch] = []
    try:
        with output.progress() as progress:
            bar = progress.add_task("windows, off and on", total=len(plan))
            for batch in paired.measured(loaded.model, tokens.ids, plan, batch_size):
                batches.append(batch)
                progress.advance(bar, batch.windows)
    except KeyboardInterrupt:
        if not batches:
            raise
    finished = sum(batch.windows for batch in batches)

    result: dict[str, Any] = {
        "command": "perplexity",
        "model": loaded.describe(),
        "dataset": text.describe(),
        "settings": {
            "context": context,
            "stride": stride,
            "bos": tokens.bos,
            "batch_size": batch_size,
            "max_windows": max_windows,
            "top1_tie": scoring.TIE,
            "memory": memory_method(),
        },
        **summary(batches, tokens.text_up_to(plan[finished - 1].end)),
        "windows": {"planned": len(plan), "finished": finished},
        "interrupted": finished < len(plan),
        "machine": described_machine,
    }
    outputs.deliver(result, csv_rows(result["trials"]), partial(render, result))
    if result["interrupted"]:
        sys.exit(130)


def summary(batches: Sequence[paired.Batch], text: str) -> dict[str, Any]:
    """The measured part of the result: `text` is what the scored tokens of these batches make up."""
    words, n_bytes = len(text.split()), len(text.encode())
    nll = {name: np.concatenate([batch.nll[name] for batch in batches]) for name in ARMS}
    delta = scoring.mean(nll["on"] - nll["off"])
    flash = sum((batch.flash for batch in batches), start=Flash())
    trials = [_trial(batch) for batch in batches]
    arms: dict[str, Any] = {
        name: {
            **asdict(scoring.perplexity(nll[name], words, n_bytes)),
            "tokens_per_s": median(trial[name]["tokens_per_s"] for trial in trials),
            "peak_memory_mb": max(trial[name]["peak_memory_mb"] for trial in trials),
        }
        for name in ARMS
    }
    return {
        "tokens": len(nll["off"]),
        "words": words,
        "bytes": n_bytes,
        **arms,
        "paired": {
            "delta_nll": delta.value,
            "delta_nll_se": delta.se,
            "max_abs_dlogit": float(np.max([batch.max_abs_dlogit for batch in batches])),
            "mean_kl": scoring.mean(np.concatenate([batch.kl for batch in batches])).value,
            "top1_agreement": float(np.concatenate([batch.agrees for batch in batches]).mean()),
        },
        "flash": flash.describe(),
        "trials": trials,
    }


def _trial(batch: paired.Batch) -> dict[str, Any]:
    described: dict[str, Any] = {
        "windows": batch.windows,
        "tokens": batch.tokens_read,
        "order": list(batch.order),
    }
    for name, trial in batch.trials.items():
        described[name] = trial.describe(batch.tokens_read)
    return described


def csv_rows(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each arm's share of a batch, in the order they ran."""
    return [
        {"batch": number, "arm": name, "windows": trial["windows"], "tokens": trial["tokens"], **trial[name]}
        for number, trial in enumerate(trials)
        for name in trial["order"]
    ]


def render(result: dict[str, Any], table: Table = output.columns) -> str:
    """The result as a page of text."""
    model, dataset, settings, compared = (result[key] for key in ("model", "dataset", "settings", "paired"))
    off, on = result["off"], result["on"]
    speeds = {name: [trial[name]["tokens_per_s"] for trial in result["trials"]] for name in ARMS}
    fingerprint = dataset["fingerprint"].removeprefix("sha256:")[:8]
    bos = "BOS" if settings["bos"] else "no BOS"
    header = " · ".join(
        [
            models.title(model),
            ", ".join(filter(None, (dataset["name"], dataset["revision"], f"text {fingerprint}"))),
            f"context {settings['context']}, stride {settings['stride']}, {bos}",
            f"{result['tokens']:,} tokens",
            result["machine"]["device"],
        ]
    )
    figures = table(
        [
            ("", "patch off", "patch on", "difference"),
            (
                "token perplexity",
                *(f"{output.plain(arm['ppl'])} ± {output.plain(arm['ppl_se'], 2)}" for arm in (off, on)),
                f"ΔNLL {compared['delta_nll']:+.1e} ± {compared['delta_nll_se']:.1e}",
            ),
            (
                "word / byte perplexity",
                *(f"{output.plain(arm['word_ppl'], 3)} / {output.plain(arm['byte_ppl'], 4)}" for arm in (off, on)),
                "",
            ),
            ("bits per byte", *(output.plain(arm["bits_per_byte"]) for arm in (off, on)), ""),
            (
                "prefill tokens/s",
                *(output.spread(speeds[name]) for name in ARMS),
                output.ratio(on["tokens_per_s"], off["tokens_per_s"]),
            ),
            (
                "peak memory",
                *(f"{arm['peak_memory_mb']:,.1f} MB" for arm in (off, on)),
                output.ratio(on["peak_memory_mb"], off["peak_memory_mb"]),
            ),
        ]
    )
    comparison = (
        f"top-1 agreement {_percent(compared['top1_agreement'])} % · "
        f"max |Δlogit| {compared['max_abs_dlogit']:.1e} · mean KL {compared['mean_kl']:.1e} · "
        f"{Flash.of(result['flash'])}"
    )
    lines = [header, "", figures, "", comparison, verdict(result)]
    if result["interrupted"]:
        finished, planned = result["windows"]["finished"], result["windows"]["planned"]
        lines.append(f"Interrupted after {finished:,} of {planned:,} windows; the figures are of those.")
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> str:
    """One sentence that is true of the figures above it."""
    off, on, compared = result["off"], result["on"], result["paired"]
    if not result["flash"]["calls"]:
        return "The patch never ran: both columns are MLX's own attention."
    if not np.isfinite(compared["max_abs_dlogit"]):
        return "Not comparable: there are logits that are no finite numbers."
    if compared["top1_agreement"] == 1 and abs(compared["delta_nll"]) <= SAME_NLL:
        predictions = "Same predictions"
    else:
        differ, tokens = round((1 - compared["top1_agreement"]) * result["tokens"]), result["tokens"]
        top1 = f"top-1 at {differ:,} of {tokens:,} tokens"
        predictions = f"Predictions differ: {top1}, ΔNLL {compared['delta_nll']:+.1e}"
    ratios = [f"{output.ratio(on['tokens_per_s'], off['tokens_per_s'])} the speed"]
    if off["peak_memory_mb"]:
        ratios.append(f"{output.ratio(on['peak_memory_mb'], off['peak_memory_mb'])} the memory")
    return f"{predictions}; {', '.join(ratios)}."


def _percent(share: float) -> str:
    """Rounded down: 100.000 only if it is all of them."""
    return f"{np.floor(share * 1e5) / 1e3:.3f}"
