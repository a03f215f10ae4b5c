"""`flash-eval perplexity`: one model reads one text twice, patch off and on, and every difference is shown.

`command` reads the options, `paired.measured` does the work batch by batch, `summary` makes the contents of a
result file of it, `render` the page that people read.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, Literal

import click
import numpy as np
from rich.progress import TextColumn

from flash_evals import claims, data, machine, models, options, output, paired, reading, records, scoring
from flash_evals.claims import Ratio
from flash_evals.errors import EvalError
from flash_evals.measure import ARMS, Arm, Flash, memory_method
from flash_evals.output import Outputs, Table
from flash_evals.paired import Scores
from flash_evals.ranks import Ranks, shared
from flash_evals.reading import Rules, Size

SAME_NLL = 1e-4  # nats; a mean ΔNLL within this, and top-1 agreement everywhere, is called "same predictions"


@click.command("perplexity")
@shared
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
@reading.options
@click.option(
    "--batch-size",
    default=4,
    show_default=True,
    callback=options.at_least(1),
    help="Windows read at once. Speed and memory depend on it, the scores do not.",
)
@click.option("--max-windows", type=int, callback=options.at_least(1), help="Stop after this many windows.")
@click.option(
    "--arm",
    type=click.Choice((*ARMS, "both")),
    default="both",
    show_default=True,
    help="Run with the patch off, on, or both taking turns.",
)
@click.option(
    "--save-logprobs",
    "save",
    type=click.Path(path_type=Path),
    callback=options.writable,
    help="Write the score of each token to this file, batch by batch, for --compare and --resume.",
)
@click.option(
    "--compare",
    type=click.Path(path_type=Path),
    help="Compare the --arm that runs with the other arm in this file, token by token. If the file has only the same "
    "arm, compare with that: of another machine, version or model. Text, tokens and windows must be the same.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    callback=options.writable,
    help="As --save-logprobs, and begin behind what the file holds. For a run that was stopped or killed. Only the "
    "batch size and the number of ranks may change.",
)
@options.blas
@options.outputs
def command(
    ranks: Ranks,
    model: str | None,
    revision: str | None,
    adapter_path: str | None,
    dataset: tuple[str, ...],
    config: str | None,
    split: str | None,
    column: str | None,
    dataset_revision: str | None,
    rules: Rules,
    batch_size: int,
    max_windows: int | None,
    arm: Arm | Literal["both"],
    save: Path | None,
    compare: Path | None,
    resume: Path | None,
    outputs: Outputs,
) -> None:
    """Perplexity, speed and memory of a model, patch off against patch on.

    Both arms read the same batches and take turns in going first. A window to warm up is not counted. One --arm can
    also run alone and be compared with a saved run. Then KL and |Δlogit| are not known, and speed and memory get a
    ratio only if both arms ran under the same conditions.

    \b
    token perplexity   exp of the mean cost of a token, -ln p. ± is the standard
                       error of that mean, as if tokens were independent
    word / byte perplexity
                       the same cost per word (split at white space) and per byte
                       (UTF-8) of the original text, to compare models whose
                       tokenizers differ
    bits per byte      the cost per byte as a number of bits
    ΔNLL               on minus off (with --compare the second column minus the
                       first), mean over the tokens ± its standard error
    prefill tokens/s   median of the batches (20th to 80th percentile), of a rank
    peak memory        the most that a batch needs on top of the loaded model
    difference         ratio of the two columns; ~ behind it: their trials
                       overlap, and no difference is claimed
    top-1 agreement    tokens where both arms rank the same one first, or tied
    max |Δlogit|       largest difference of any logit at any scored token
    mean KL            KL(off || on) of the predicted distributions, in nats
    flash:             what ran with the patch on: calls of each kernel, and
                       fallbacks, which are calls left to MLX, with the reason

    "Same predictions" is said if top-1 agrees everywhere and ΔNLL is within 1e-4.

    Each token is scored once. The first is not, if there is no BOS before it. Ctrl-C ends the run and reports the
    batches that are finished.

    Under mlx.launch -n N the batches are spread over N processes. The scores are the same. Rank 0 prints and writes.
    """
    _require_one_use(arm, compare, save, resume, outputs)
    described_machine = machine.describe()
    text = data.load(*dataset, config=config, split=split, column=column, revision=dataset_revision)
    loaded = models.load(model, revision, adapter_path)
    read = reading.read(loaded, text, rules)
    plan = read.plan[:max_windows]
    settings = {**read.settings, "top1_tie": scoring.TIE}
    which = ARMS if arm == "both" else (arm,)
    header = records.Header(
        text=f"sha256:{text.fingerprint}",
        tokens=records.fingerprint_of_ids(read.ids),
        scoring=settings,
        arms=list(which),
        weights=records.fingerprint_of_weights(loaded),
        model=loaded.describe(),
        dataset=text.describe(),
        batch_size=batch_size,
        ranks=ranks.size,
        machine=described_machine,
    )
    ranks.agree((header.of_the_scores(), header.weights), "text, model and settings")
    other = records.read(compare, header, read.plan, len(plan)) if compare and ranks.rank == 0 else None

    kept = (save or resume) if ranks.rank == 0 else None
    with records.appending(kept, header, read.plan, resume=bool(resume)) as (held, keep):
        batches = list(ranks.all(lambda: held)[0])
        resumed = records.windows(batches)
        if resumed > len(plan):
            raise EvalError(f"--resume {resume} holds {resumed:,} windows, --max-windows is {max_windows}")
        if ranks.rank == 0:
            machine.say_what_bounds(described_machine)
        work = paired.measured(loaded.model, read.ids, plan[resumed:], batch_size, which, ranks)
        failure = _watched(work, keep, batches, f"windows, {' and '.join(which)}", len(plan))
    finished = records.windows(batches)
    if ranks.rank == 0:
        result: dict[str, Any] = {
            "command": "perplexity",
            "model": loaded.describe(),
            "dataset": text.describe(),
            "settings": {
                **settings,
                "arm": arm,
                "batch_size": batch_size,
                "max_windows": max_windows,
                "memory": memory_method(),
            },
            **summary(batches, read.size_up_to(plan[finished - 1]), other, header),
            "ranks": _together(batches[len(held) :], ranks.size),
            "windows": {"planned": len(plan), "finished": finished, "resumed": resumed},
            "interrupted": finished < len(plan),
            "machine": described_machine,
        }
        outputs.deliver(result, csv_rows(result["trials"]), partial(render, result))
    if isinstance(failure, Exception):
        raise failure
    if finished < len(plan):
        sys.exit(130)


def _require_one_use(arm: str, compare: Path | None, save: Path | None, resume: Path | None, outputs: Outputs) -> None:
    if compare and arm == "both":
        raise EvalError("--compare takes --arm off or --arm on: the other one is that of the file")
    if save and resume:
        raise EvalError("--resume keeps what --save-logprobs does: give one of them")
    files = {
        "--compare": compare,
        "--save-logprobs": save,
        "--resume": resume,
        "--json": outputs.json_file,
        "--csv": outputs.csv_file,
    }
    used = [(option, path) for option, path in files.items() if path]
    for (option, path), (another, path_there) in combinations(used, 2):
        if path.resolve() == path_there.resolve():
            raise EvalError(f"{option} and {another} are the same file: {path}")


def _watched(
    work: Iterable[paired.Batch],
    keep: Callable[[paired.Batch], None],
    batches: list[paired.Batch],
    what: str,
    total: int,
) -> Exception | KeyboardInterrupt | None:
    """Adds each batch to `batches`, keeps it, and shows how far it is. Gives what ended the work too early; if there
    is no batch at all, that is raised.
    """
    try:
        with output.progress(TextColumn("{task.fields[status]}")) as progress:
            bar = progress.add_task(what, total=total, completed=records.windows(batches), status="")
            for batch in work:
                batches.append(batch)
                keep(batch)
                progress.update(bar, advance=batch.windows, status=_status(batch))
    except (Exception, KeyboardInterrupt) as error:
        if not batches:
            raise
        return error
    return None


def _status(batch: paired.Batch) -> str:
    speeds = " · ".join(f"{name} {batch.tokens_read / trial.seconds:,.0f}" for name, trial in batch.trials.items())
    peak = max(trial.peak_memory for trial in batch.trials.values())
    return f"{speeds} tokens/s · peak {peak / 1e6:,.1f} MB"


@dataclass(frozen=True)
class Column:
    """What one arm made of the text, measured now or read from a file."""

    scores: Scores
    trials: list[dict[str, Any]]
    flash: Flash

    @classmethod
    def of(cls, batches: Sequence[paired.Batch], arm: Arm) -> "Column":
        scores = Scores.join([batch.scores[arm] for batch in batches])
        flash = sum((batch.flash for batch in batches), start=Flash()) if arm == "on" else Flash()
        return cls(scores, [batch.trials[arm].describe(batch.tokens_read) for batch in batches], flash)

    def figures(self, size: Size) -> dict[str, Any]:
        return {
            **asdict(scoring.perplexity(self.scores.nll, *size)),
            "tokens_per_s": median(trial["tokens_per_s"] for trial in self.trials),
            "peak_memory_mb": max(trial["peak_memory_mb"] for trial in self.trials),
        }


def summary(
    batches: Sequence[paired.Batch], size: Size, other: records.Kept | None, header: records.Header
) -> dict[str, Any]:
    """The measured part of the result; the scored tokens of these batches make up text of that size."""
    columns: dict[str, Column] = {name: Column.of(batches, name) for name in ARMS if name in batches[0].trials}
    compared = None
    if other:
        [live] = columns
        held = other.header.arms
        arm = next((name for name in held if name != live), held[0])
        column = "other" if arm == live else arm
        tokens = len(columns[live].scores.nll)
        theirs = Column.of(other.batches, arm)
        columns[column] = Column(theirs.scores.first(tokens), theirs.trials, theirs.flash)
        compared = {
            "file": str(other.path),
            "arm": arm,
            "column": column,
            "differs_in": records.differences(other.header.of_the_conditions(), header.of_the_conditions()),
            "model": other.header.model,
            "batch_size": other.header.batch_size,
            "ranks": other.header.ranks,
            "machine": other.header.machine,
            "trials": theirs.trials,
        }
    order = [name for name in ("other", *ARMS) if name in columns]
    return {
        "tokens": len(columns[order[0]].scores.nll),
        "words": size.words,
        "bytes": size.bytes,
        **{name: columns[name].figures(size) for name in order},
        "paired": _paired(order, columns, batches) if len(order) > 1 else None,
        "compared": compared,
        "flash": (columns["on"].flash if "on" in columns else Flash()).describe(),
        "trials": [_trial(batch) for batch in batches],
    }


def _paired(order: Sequence[str], columns: dict[str, Column], batches: Sequence[paired.Batch]) -> dict[str, Any]:
    """The second column against the first. What takes the logits of both is None if only one arm ran."""
    first, second = (columns[name].scores for name in order)
    delta = scoring.mean(second.nll - first.nll)
    both = [(batch.kl, batch.max_abs_dlogit) for batch in batches if batch.kl is not None]
    return {
        "of": list(order),
        "delta_nll": delta.value,
        "delta_nll_se": delta.se,
        "max_abs_dlogit": float(np.max([dlogit for _, dlogit in both])) if both else None,
        "mean_kl": scoring.mean(np.concatenate([kl for kl, _ in both])).value if both else None,
        "top1_agreement": float(paired.top1_agrees(first, second).mean()),
    }


def _together(batches: Sequence[paired.Batch], ranks: int) -> dict[str, Any]:
    """How many ranks took part, and the tokens per second of all together: the sum of their medians."""
    speeds: dict[Arm, dict[int, list[float]]] = {}
    for batch in batches:
        for name, trial in batch.trials.items():
            speeds.setdefault(name, {}).setdefault(batch.rank, []).append(batch.tokens_read / trial.seconds)
    together = {name: sum(map(median, of_rank.values())) for name, of_rank in speeds.items()}
    return {"size": ranks, "tokens_per_s": together}


def _trial(batch: paired.Batch) -> dict[str, Any]:
    described: dict[str, Any] = {
        "windows": batch.windows,
        "tokens": batch.tokens_read,
        "rank": batch.rank,
        "order": list(batch.order),
    }
    for name, trial in batch.trials.items():
        described[name] = trial.describe(batch.tokens_read)
    return described


def csv_rows(trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each arm's share of a batch, in the order they ran."""
    return [
        {
            "batch": number,
            "arm": name,
            "windows": trial["windows"],
            "tokens": trial["tokens"],
            "rank": trial["rank"],
            **trial[name],
        }
        for number, trial in enumerate(trials)
        for name in trial["order"]
    ]


def render(result: dict[str, Any], table: Table = output.columns) -> str:
    """The result as a page of text."""
    model, dataset, settings, compared = (result[key] for key in ("model", "dataset", "settings", "compared"))
    shown = [name for name in ("other", *ARMS) if name in result]
    arms = [result[name] for name in shown]
    trials = _trials(result)
    titles = {"off": "patch off", "on": "patch on"}
    if compared:
        titles[compared["column"]] = f"patch {compared['arm']}, {Path(compared['file']).name}"
    fingerprint = dataset["fingerprint"].removeprefix("sha256:")[:8]
    header = " · ".join(
        [
            models.title(model),
            ", ".join(filter(None, (dataset["name"], dataset["revision"], f"text {fingerprint}"))),
            reading.described(settings),
            f"{result['tokens']:,} tokens",
            result["machine"]["device"],
        ]
    )
    ranks = result["ranks"]
    speed = "prefill tokens/s" if ranks["size"] == 1 else "prefill tokens/s, each rank"
    rows = [
        ("", *(titles[name] for name in shown), "difference"),
        (
            "token perplexity",
            *(f"{output.plain(arm['ppl'])} ± {output.plain(arm['ppl_se'], 2)}" for arm in arms),
            _delta_nll(result["paired"]),
        ),
        (
            "word / byte perplexity",
            *(f"{_known(arm['word_ppl'], 3)} / {_known(arm['byte_ppl'])}" for arm in arms),
            "",
        ),
        ("bits per byte", *(_known(arm["bits_per_byte"]) for arm in arms), ""),
        (
            speed,
            *(output.spread([trial["tokens_per_s"] for trial in trials[name]]) for name in shown),
            str(_ratio(result, "tokens_per_s")),
        ),
        (
            "peak memory",
            *(f"{arm['peak_memory_mb']:,.1f} MB" for arm in arms),
            str(_ratio(result, "peak_memory_mb")),
        ),
    ]
    if ranks["size"] > 1:
        together = [f"{ranks['tokens_per_s'][name]:,.0f}" if name in ranks["tokens_per_s"] else "" for name in shown]
        rows.insert(5, (f"{ranks['size']} ranks together", *together, ""))
    figures = table(rows if result["paired"] else [row[:-1] for row in rows])
    lines = [header, "", figures, ""]
    if comparison := _comparison(result):
        lines.append(comparison)
    if compared:
        differs = "; ".join(compared["differs_in"]) or "nothing: the same model, machine, versions and batch size"
        lines.append(f"{Path(compared['file']).name} differs in {differs}")
    lines.append(verdict(result))
    lines += machine.what_bounds(result["machine"])
    if result["windows"]["resumed"]:
        lines.append(f"{result['windows']['resumed']:,} windows are from an earlier run.")
    if result["interrupted"]:
        finished, planned = result["windows"]["finished"], result["windows"]["planned"]
        lines.append(f"Interrupted after {finished:,} of {planned:,} windows; the figures are of those.")
    return "\n".join(lines)


def _delta_nll(compared: dict[str, Any] | None) -> str:
    return f"ΔNLL {compared['delta_nll']:+.1e} ± {compared['delta_nll_se']:.1e}" if compared else ""


def _trials(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Those of each column."""
    columns: dict[str, list[dict[str, Any]]]
    columns = {name: [trial[name] for trial in result["trials"] if name in trial] for name in ARMS}
    if compared := result["compared"]:
        columns[compared["column"]] = compared["trials"]
    return columns


def _ratio(result: dict[str, Any], figure: str) -> Ratio:
    """Not known if there is nothing to compare, or if the patch is not all that two arms differ in."""
    compared = result["compared"]
    if not result["paired"] or (compared and compared["column"] != "other" and compared["differs_in"]):
        return Ratio(None, apart=False)
    first, second = result["paired"]["of"]
    trials = _trials(result)
    return Ratio.of(
        claims.quotient(result[second][figure], result[first][figure]),
        *([trial[figure] for trial in trials[name]] for name in (first, second)),
    )


def _comparison(result: dict[str, Any]) -> str:
    """What the predictions have to do with each other, and what flash did, as far as there are two arms and flash."""
    compared, parts = result["paired"], []
    if compared:
        parts += [
            f"top-1 agreement {_percent(compared['top1_agreement'])} %",
            f"max |Δlogit| {_small(compared['max_abs_dlogit'])}",
            f"mean KL {_small(compared['mean_kl'])}",
        ]
    if "on" in result:
        parts.append(str(Flash.of(result["flash"])))
    return " · ".join(parts)


def _known(x: float | None, digits: int = 4) -> str:
    return "–" if x is None else output.plain(x, digits)


def _small(x: float | None) -> str:
    return "–" if x is None else f"{x:.1e}"


def verdict(result: dict[str, Any]) -> str:
    """One sentence that is true of the figures above it."""
    compared = result["paired"]
    if "on" in result and not result["flash"]["calls"]:
        which = "both columns are" if compared else "this is"
        return f"The patch never ran: {which} MLX's own attention."
    if not compared:
        return "One arm: nothing is compared."
    if not np.isfinite(compared["delta_nll"]) or not np.isfinite(compared["max_abs_dlogit"] or 0):
        return "Not comparable: there are logits that are no finite numbers."
    if compared["top1_agreement"] == 1 and abs(compared["delta_nll"]) <= SAME_NLL:
        predictions = "Same predictions"
    else:
        differ, tokens = round((1 - compared["top1_agreement"]) * result["tokens"]), result["tokens"]
        top1 = f"top-1 at {differ:,} of {tokens:,} tokens"
        predictions = f"Predictions differ: {top1}, ΔNLL {compared['delta_nll']:+.1e}"
    ratios = {"speed": _ratio(result, "tokens_per_s"), "memory": _ratio(result, "peak_memory_mb")}
    return "; ".join(filter(None, (predictions, claims.sentence(ratios)))) + "."


def _percent(share: float) -> str:
    """Rounded down: 100.000 only if it is all of them."""
    return f"{np.floor(share * 1e5) / 1e3:.3f}"
