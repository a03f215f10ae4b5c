"""`flash-eval perplexity`: one text, one model, read twice, with the patch off and on, and every difference between them.

`command` reads the options, `measured` does the work batch by batch, `summary` makes the result file's contents of it,
`render` makes the table of those.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import mlx.core as mx
import numpy as np

from flash_evals import data, machine, models, options, report, scoring
from flash_evals.errors import EvalError
from flash_evals.measure import Arm, Flash, Trial, arms, memory_method, run
from flash_evals.scoring import Window

MB = 1e6
SAME_NLL = 1e-4  # nats; a mean ΔNLL within this, and top-1 agreement everywhere, is called "same predictions"


@click.command("perplexity")
@options.model
@click.option(
    "--dataset",
    default="pydoc",
    show_default=True,
    metavar="NAME",
    help="pydoc (documentation that every CPython carries), wikitext (Salesforce/wikitext, wikitext-2-raw-v1), "
    "a .txt, .jsonl or .parquet file, a folder of parquet files, or any hub id.",
)
@click.option("--config", help="Configuration of a hub dataset, as the hub names it.")
@click.option("--split", help="Split of a hub dataset or a folder.  [default: test]")
@click.option("--text-column", "column", help="Column that holds the text.  [default: text]")
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
    help="Tokens from one window to the next. Smaller than the context: each token is scored with more context, and "
    "it takes longer.  [default: the context]",
)
@click.option(
    "--batch-size",
    default=4,
    show_default=True,
    callback=options.at_least(1),
    help="Windows read at once. Speed and memory depend on it, the scores do not.",
)
@click.option("--max-windows", type=int, callback=options.at_least(1), help="Stop after this many windows.")
@options.json_file
@options.csv_file
def command(
    model: str | None,
    dataset: str,
    config: str | None,
    split: str | None,
    column: str | None,
    context: int,
    stride: int | None,
    batch_size: int,
    max_windows: int | None,
    json_file: Path | None,
    csv_file: Path | None,
) -> None:
    """Perplexity, speed and memory of a model, patch off against patch on.

    Both arms read the same batches, taking turns in going first; a first one to warm up is not counted.

    \b
    token perplexity   exp of the mean cost of a token, -ln p. ±: standard error of the
                       tokens' mean, taken as independent (text is not: it is a lower bound)
    word / byte        the same cost per word (split at white space) and per byte (UTF-8) of
                       the original text: comparable between models with other tokenizers
    ΔNLL               on minus off, mean of the tokens' differences ± its standard error
    prefill tokens/s   median of the batches, and their range from 20th to 80th percentile
    peak memory        what a batch needs on top of the loaded model, the highest of all
    top-1 agreement    tokens where both arms rank the same one first, up to ties
    max |Δlogit|       the largest difference of any logit of any scored token
    mean KL            divergence of the predicted distributions, KL(off || on), in nats

    "Same predictions" is said if top-1 agrees everywhere and ΔNLL is within 1e-4.

    Each token is scored once, the first excepted if the model's tokenizer sets no BOS before it. Documents are joined by
    a blank line. Ctrl-C ends the run and reports the batches that are finished.
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise EvalError(f"--stride must be between 1 and the context of {context}, not {stride}")
    text = data.load(dataset, config, split, column)
    loaded = models.load(model)
    loaded.require_positions(context, "--context")
    tokens = models.encode(loaded, text.text)
    if len(tokens.ids) < 2:
        raise EvalError(f"{text.name} has {len(tokens.ids)} tokens for this model; scoring one takes two")
    plan = scoring.windows(len(tokens.ids), context, stride)[:max_windows]

    batches: list[Batch] = []
    try:
        with report.progress() as progress:
            bar = progress.add_task("windows, off and on", total=len(plan))
            for batch in measured(loaded, tokens.ids, plan, batch_size):
                batches.append(batch)
                progress.advance(bar, batch.windows)
    except KeyboardInterrupt:
        if not batches:
            click.echo("Interrupted before the first batch was finished: nothing was measured.", err=True)
            sys.exit(130)
    finished = sum(batch.windows for batch in batches)

    result = {
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
        "machine": machine.describe(),
    }
    click.echo(render(result))
    if json_file:
        report.write_json(json_file, result)
    if csv_file:
        report.write_csv(csv_file, csv_rows(result["trials"]))
    if result["interrupted"]:
        sys.exit(130)


@dataclass(frozen=True)
class Batch:
    """What both arms made of the same windows: one number for each token scored, one trial for each arm."""

    windows: int
    tokens_read: int
    order: tuple[Arm, Arm]
    trials: dict[Arm, Trial]
    nll: dict[Arm, np.ndarray]
    kl: np.ndarray
    agrees: np.ndarray
    max_abs_dlogit: float
    flash: Flash


def measured(
    loaded: models.LoadedModel, ids: np.ndarray, plan: Sequence[Window], batch_size: int
) -> Iterator[Batch]:
    """Reads the planned windows of the tokens `ids`, `batch_size` at a time, under both arms, and compares the logits.

    All windows of a plan are of one length, so a batch needs no padding and is a matter of speed alone.
    """
    batches = [plan[first : first + batch_size] for first in range(0, len(plan), batch_size)]
    for name in arms(0):
        run(name, lambda: _forward(loaded, _read(ids, batches[0])), Flash())  # warm-up
    for number, batch in enumerate(batches):
        read, flash_did, logits, trials = _read(ids, batch), Flash(), {}, {}
        for name in arms(number):
            logits[name], trials[name] = run(name, lambda: _forward(loaded, read), flash_did)
        rows = [_compare(logits["off"][row], logits["on"][row], ids, window) for row, window in enumerate(batch)]
        yield Batch(
            windows=len(batch),
            tokens_read=read.size,
            order=arms(number),
            trials=trials,
            nll={name: np.concatenate([row.nll[name] for row in rows]) for name in arms(0)},
            kl=np.concatenate([row.kl for row in rows]),
            agrees=np.concatenate([row.agrees for row in rows]),
            max_abs_dlogit=max(row.max_abs_dlogit for row in rows),
            flash=flash_did,
        )
