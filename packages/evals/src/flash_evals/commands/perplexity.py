"""`flash-eval perplexity`: one model reads one text twice, patch off and on, and the page shows the differences.

This module reads the options. `plan` cuts the text into windows. `paired` reads batches of windows with the patch off
and on. `score_file` saves each batch's scores. `summary` computes the result. `perplexity_page` describes the result,
and `Outputs` prints the description.
"""

from collections.abc import Generator
from pathlib import Path
from typing import get_args

import click

from flash_evals.commands import options, runner
from flash_evals.commands.outputs import Outputs
from flash_evals.pages import perplexity_page as page
from flash_evals.results.arms import ARMS
from flash_evals.results.errors import EvalError
from flash_evals.results.perplexity_result import Documents, Scoring, Settings
from flash_evals.results.provenance import Part
from flash_evals.work import caches, data, machine, models, paired, plan, score_file, scoring, summary
from flash_evals.work.measure import memory_method
from flash_evals.work.models import Bos
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
    help="Text to read. pydoc: documentation that comes with CPython. wikitext: Salesforce/wikitext (by default its "
    "configuration wikitext-2-raw-v1). Or a .txt, .jsonl or .parquet file (repeat --dataset for more files), any hub "
    "id, or - for stdin.",
)
@click.option("--config", help="Configuration of a hub dataset, as the hub names it.")
@click.option("--split", help="Split of a hub dataset.  [default: test]")
@click.option("--text-column", "column", help="Column that holds the text.  [default: text]")
@click.option("--dataset-revision", help="Branch, tag or commit of a hub dataset.  [default: main]")
@click.option("--context", default=256, callback=options.at_least(2), help="Tokens that the model reads in one window.")
@click.option(
    "--stride",
    type=int,
    help="Tokens between the starts of two windows. A stride below the context puts more text before each scored "
    "token, and takes longer.  [default: the context]",
)
@click.option(
    "--scoring",
    type=click.Choice(get_args(Scoring)),
    default="rolling",
    help="Which tokens are scored. rolling: each token once, as in lm-evaluation-harness. half: only the second "
    "half of each chunk of --context tokens, as in llama.cpp's llama-perplexity; then there is no "
    "word or byte perplexity.",
)
@click.option(
    "--documents",
    type=click.Choice(get_args(Documents)),
    default="joined",
    help="joined: the documents form one text, with a blank line between two (in WikiText, as in its file). "
    "separate: the model reads each document without the others, as in lm-evaluation-harness.",
)
@click.option(
    "--bos",
    type=click.Choice(get_args(Bos)),
    default="auto",
    help="Put a BOS token before the text, or each separate document, so that the first token is scored too; with "
    "--scoring half the BOS replaces the first token of each chunk. auto: only if the model's tokenizer adds a "
    "BOS by itself. always: in any case; EOS stands in for a missing BOS, as in lm-evaluation-harness.",
)
@click.option(
    "--detokenise/--no-detokenise",
    default=None,
    help="Undo WikiText's tokenisation before the model reads it: `2 @.@ 5 kg ( 6 lb )` becomes `2.5 kg (6 lb)`. "
    "Word and byte perplexity still count the original text.  [default: yes if --dataset names WikiText]",
)
@click.option(
    "--batch-size",
    default=4,
    callback=options.at_least(1),
    help="Windows that the model reads at once. This changes speed and memory, not the scores.",
)
@click.option("--max-windows", type=int, callback=options.at_least(1), help="Stop after this many windows.")
@click.option(
    "--arm",
    type=click.Choice((*ARMS, "both")),
    default="both",
    help="Run with the patch off, with it on, or with both in turns.",
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
    help="Compare this run, token by token, with the run that --save-logprobs wrote to this file: with that run's "
    "other arm or, if it has none, with the same arm (on another machine, version or model). Both runs must read the "
    "same text, tokens and windows.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    callback=options.writable,
    help="Continue a stopped or killed run: append the batches that this file lacks, as --save-logprobs does. Only "
    "--batch-size, --max-windows and the number of ranks may differ from that run.",
)
@options.kv_bits
@options.kv_group_size
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
    max_windows: int | None,
    arm: str,
    save: Path | None,
    compare: Path | None,
    resume: Path | None,
    **_: object,  # the other options; options.given() reads them from the context of click
) -> None:
    """Compare a model's perplexity, speed and memory, patch off and patch on.

    Both arms, patch off and patch on, read the same batches and take turns at going first. To warm up, each arm first
    reads the first window (on a CPU at most 256 tokens of it). The figures do not include the warm-up. You can also run
    one --arm alone and compare it with a saved run: then the page leaves out KL and |Δlogit|, and shows ratios of speed
    and memory only if both runs had the same conditions.

    \b
    token perplexity   exp of the mean cost per token (-ln p) ± its standard
                       error, computed as if tokens were independent
    word / byte perplexity
                       perplexity per word (split at white space) and per byte
                       (UTF-8) of the original text, to compare models whose
                       tokenizers differ
    bits per byte      cost per byte of the original text, in bits
    ΔNLL               cost per token in the second column minus that in the
                       first: mean over the tokens ± its standard error
    prefill tokens/s   tokens that one rank reads per second: median of the
                       batches (20th to 80th percentile)
    peak memory        the most that a batch needs on top of the loaded model
    difference         the second column divided by the first; ~ marks no clear
                       difference: the trials overlap or are few
    top-1 agreement    share of positions where both arms rank the same token
                       first, or tied for first
    max |Δlogit|       largest difference of any logit at any scored token
    mean KL            KL(off || on) of the predicted distributions, in nats
    flash:             with the patch on: calls of each flash kernel;
                       fallbacks (calls that flash attention cannot compute)
                       with the reason; and calls left to MLX's own attention,
                       because it is faster

    The page says "Same predictions" if top-1 agreement is 100 % and ΔNLL is within 1e-4.

    The model scores each token once. It scores the first token of the text, or of each separate document, only if a
    BOS stands before it. Ctrl-C ends the run and reports the finished batches.

    Under `mlx.launch -n N`, N processes share the batches, and the scores stay the same. Rank 0 prints and writes the
    results.
    """
    rules: Rules = options.given(Rules)
    if compare and arm == "both":
        raise EvalError("--compare needs --arm off or --arm on: the other arm comes from the file")
    if save and resume:
        raise EvalError("--resume also saves scores, as --save-logprobs does: give only one of the two")
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
    ranks.agree((text.dataset, settings, header.tokens, header.weights), "text, model or settings")
    forward = caches.reader(loaded, settings.kv_bits, kv_group_size=settings.kv_group_size)
    other = score_file.read(compare, header, planned.windows, len(windows)) if compare and ranks.rank == 0 else None

    kept = (save or resume) if ranks.rank == 0 else None
    with score_file.appending(kept, header, planned.windows, resume=bool(resume)) as (held, keep):
        before = ranks.all(lambda: held, list[Batch])[0]
        resumed = score_file.windows_in(before)
        if resumed > len(windows):
            raise EvalError(f"--resume {resume} holds {resumed:,} windows, more than --max-windows {max_windows}")

        def work() -> Generator[Batch, None, None]:
            left = windows[resumed:]
            how = settings.batch_size, settings.arms, ranks, settings.precision
            for batch in paired.batches(forward, planned.ids, left, *how):
                yield batch
                keep(batch)  # saves it before the next batch begins

        if ranks.rank == 0:
            runner.say_what_bounds(header.machine)
        what, total = f"windows, {' and '.join(settings.arms)}", len(windows)
        batches, stopped = runner.collect(work(), what, total, before, lambda batch: batch.trial.windows, _status)
    if ranks.rank == 0:
        result = summary.result(header, planned, len(windows), before, batches, other)
        options.given(Outputs).deliver(page.description(result))
    runner.end(stopped)


def _status(batch: Batch) -> str:
    measured = {name: batch.trial[name] for name in batch.trial.order}
    speeds = " · ".join(f"{name} {of_arm.tokens_per_s:,.0f}" for name, of_arm in measured.items())
    return f"{speeds} tokens/s · peak {max(of_arm.peak_memory_mb for of_arm in measured.values()):,.1f} MB"
