"""`flash-eval perplexity`: one model reads one text twice, patch off and on, and every difference is shown.

From the command to the page: here are the options; `plan` makes windows of a text; `paired` reads them with both arms,
batch by batch, and `score_file` keeps the batches; `summary` makes records of them; `perplexity_page` describes those,
and `Outputs` prints it.
"""

from collections.abc import Generator
from pathlib import Path

import click

from flash_evals.commands import options, rules, runner
from flash_evals.commands.outputs import Outputs
from flash_evals.pages import perplexity_page as page
from flash_evals.results.arms import ARMS
from flash_evals.results.errors import EvalError
from flash_evals.results.perplexity_result import Settings
from flash_evals.results.provenance import Part
from flash_evals.work import data, machine, models, paired, plan, score_file, scoring, summary
from flash_evals.work.measure import memory_method
from flash_evals.work.paired import Batch
from flash_evals.work.plan import Rules
from flash_evals.work.ranks import Ranks, shared


@click.command("perplexity", context_settings={"show_default": True})
@shared
@options.model
@options.adapter_path
@click.option(
    "--dataset",
    default=["pydoc"],
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
@rules.options
@click.option(
    "--batch-size",
    default=4,
    callback=options.at_least(1),
    help="Windows read at once. Speed and memory depend on it, the scores do not.",
)
@click.option("--max-windows", type=int, callback=options.at_least(1), help="Stop after this many windows.")
@click.option(
    "--arm",
    type=click.Choice((*ARMS, "both")),
    default="both",
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
    callback=options.own_file,
    help="Compare the --arm that runs with the other arm in this file, token by token. If the file has only the same "
    "arm, compare with that: of another machine, version or model. Text, tokens and windows must be the same.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    callback=options.writable,
    help="As --save-logprobs, and begin behind what the file holds. For a run that was stopped or killed. The batch "
    "size, --max-windows and the number of ranks may change, nothing else.",
)
@options.precision("input", "the patch")
@options.blas
@options.outputs
def command(
    ranks: Ranks,
    model: str | None,
    revision: str | None,
    adapter_path: str | None,
    dataset: tuple[str, ...],
    dataset_revision: str | None,
    rules: Rules,
    max_windows: int | None,
    arm: str,
    save: Path | None,
    compare: Path | None,
    resume: Path | None,
    outputs: Outputs,
    **_: object,  # what the settings and the part of the dataset take as it is
) -> None:
    """Perplexity, speed and memory of a model, patch off against patch on.

    Both arms read the same batches and take turns in going first. A window to warm up is not counted. One --arm can
    also run alone and be compared with a saved run. Then KL and |Δlogit| are not known, and speed and memory of
    off and on get a ratio only if both ran under the same conditions.

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
                       overlap or are few, and no difference is claimed
    top-1 agreement    tokens where both arms rank the same one first, or tied
    max |Δlogit|       largest difference of any logit at any scored token
    mean KL            KL(off || on) of the predicted distributions, in nats
    flash:             what ran with the patch on: calls of each kernel, and
                       fallbacks, which are calls that flash cannot take, with
                       the reason; and calls left to MLX, which is faster here

    "Same predictions" is said if top-1 agrees everywhere and ΔNLL is within 1e-4.

    Each token is scored once. The first is not, if there is no BOS before it. Ctrl-C ends the run and reports the
    batches that are finished.

    Under mlx.launch -n N the batches are spread over N processes. The scores are the same. Rank 0 prints and writes.
    """
    if compare and arm == "both":
        raise EvalError("--compare takes --arm off or --arm on: the other one is that of the file")
    if save and resume:
        raise EvalError("--resume keeps what --save-logprobs does: give one of them")
    text = data.load(*dataset, part=options.given(Part, revision=dataset_revision))
    loaded = models.load(model, revision, adapter_path)
    planned = plan.make(loaded, text, rules)
    windows = planned.windows[:max_windows]
    read_as = {
        "stride": planned.stride,
        "bos": planned.bos,
        "detokenised": planned.detokenised,
        "top1_tie": scoring.TIE,
    }
    settings: Settings = options.given(Settings, **read_as, memory=memory_method())
    header = score_file.Header(
        tokens=score_file.fingerprint(planned.ids.tobytes()),
        weights=score_file.fingerprint_of_weights(loaded),
        model=loaded.described,
        dataset=text.dataset,
        settings=settings,
        ranks=ranks.size,
        machine=machine.describe(),
    )
    ranks.agree((text.dataset, settings, header.tokens, header.weights), "text, model and settings")
    other = score_file.read(compare, header, planned.windows, len(windows)) if compare and ranks.rank == 0 else None

    kept = (save or resume) if ranks.rank == 0 else None
    with score_file.appending(kept, header, planned.windows, resume=bool(resume)) as (held, keep):
        before = ranks.all(lambda: held)[0]
        resumed = score_file.windows_in(before)
        if resumed > len(windows):
            raise EvalError(f"--resume {resume} holds {resumed:,} windows, --max-windows is {max_windows}")

        def work() -> Generator[Batch, None, None]:
            left = windows[resumed:]
            how = settings.batch_size, settings.arms, ranks, settings.precision
            for batch in paired.batches(loaded.model, planned.ids, left, *how):
                yield batch
                keep(batch)  # before the next one begins

        if ranks.rank == 0:
            runner.say_what_bounds(header.machine)
        what, total = f"windows, {' and '.join(settings.arms)}", len(windows)
        batches, stopped = runner.collect(work(), what, total, before, lambda batch: batch.trial.windows, _status)
    if ranks.rank == 0:
        result = summary.result(header, planned, len(windows), before, batches, other)
        outputs.deliver(page.description(result))
    runner.end(stopped)


def _status(batch: Batch) -> str:
    measured = {name: batch.trial[name] for name in batch.trial.order}
    speeds = " · ".join(f"{name} {of_arm.tokens_per_s:,.0f}" for name, of_arm in measured.items())
    return f"{speeds} tokens/s · peak {max(of_arm.peak_memory_mb for of_arm in measured.values()):,.1f} MB"
