"""`flash-eval speed`: prompt and generation tokens per second at several depths, patch off and on."""

import click

from flash_evals.commands import options, runner
from flash_evals.commands.outputs import Outputs
from flash_evals.pages import speed_page as page
from flash_evals.results.arms import Flash
from flash_evals.results.errors import EvalError
from flash_evals.results.speed_result import Case, Kind, Result, Settings
from flash_evals.work import machine, models
from flash_evals.work.measure import memory_method


@click.command("speed")
@options.model
@options.adapter_path
@options.numbers("-p", "--prompt", of="tokens", least=0, default="512", text="Prompt lengths in tokens; 0 for none.")
@options.numbers("-g", "--generate", of="tokens", least=0, default="32", text="Tokens to generate; 0 for none.")
@options.numbers("-d", "--depth", of="tokens", least=0, default="0,2048", text="Tokens in the KV cache before.")
@options.numbers("-b", "--batch-size", of="sequences", least=1, default="1", text="Sequences at once, in one batch.")
@click.option(
    "--draft-model", metavar="FOLDER|HUB_ID", help="Generate by speculative decoding: this smaller model guesses ahead."
)
@options.number("--num-draft-tokens", least=1, type=int, text="Tokens that it guesses at a time.  [default: 3]")
@options.repetitions(5, "Trials of each test and arm; one more to warm up and one to watch attention are not counted.")
@options.number("--delay", least=0, most=3600, default=0.0, metavar="SECONDS", text="Wait before trials, to cool down.")
@options.seed("Of the random tokens in the prompts.")
@options.precision("input", "the patch")
@options.blas
@options.outputs
def command(
    model: str | None,
    revision: str | None,
    adapter_path: str | None,
    draft_model: str | None,
    num_draft_tokens: int | None,
    outputs: Outputs,
    **_: object,  # what the settings take as it is
) -> None:
    """Prompt and generation tokens per second, patch off against patch on.

    \b
    pp512          a prompt of 512 tokens, up to the first new token
    tg32 @ d2048   32 tokens, one by one, with 2048 in the KV cache before
    tg32 x4        32 tokens for each of 4 sequences at once
    t/s            tokens of all sequences per second: mean of the
                   repetitions ± their standard deviation
    on/off         ratio of the medians of t/s, and of peak memory; ~ behind
                   it: the trials overlap or are few, and no difference
                   is claimed
    peak memory    the most that a trial needs on top of the model and the
                   filled cache
    attention      its share of the time, from one more trial of each arm
                   that counts nowhere else. There, each call of attention
                   is waited for before and after, which makes short calls
                   longer. –: the model computes attention in one with its
                   projections.
    accepted       the part of the draft model's tokens that the model would
                   have chosen too; prompts do without the draft model
    flash:         what ran with the patch on: calls of each kernel, and
                   fallbacks, which are calls that flash cannot take, with
                   the reason; and calls left to MLX, which is faster here

    Both arms see the same random tokens and the same cache, and take turns in going first. The time does not include
    loading and filling the cache. Ctrl-C ends the run and reports the finished trials.
    """
    from flash_evals.work import generation  # mlx-lm, and so transformers, which -h does not wait for

    settings: Settings = options.given(
        Settings,
        num_draft_tokens=(num_draft_tokens or 3) if draft_model else None,  # as in mlx_lm.generate
        prefill_step_size=generation.PREFILL_STEP_SIZE,
        memory=memory_method(),
    )
    kinds: dict[Kind, list[int]] = {"prompt": settings.prompt, "generation": settings.generate}
    cases = [
        Case(kind, tokens, depth, batch_size)
        for depth in settings.depth
        for batch_size in settings.batch_size
        for kind, lengths in kinds.items()
        for tokens in lengths
        if tokens
    ]
    if not cases:
        raise EvalError("nothing to measure: -p and -g are both 0")
    if num_draft_tokens and not draft_model:
        raise EvalError("--num-draft-tokens goes with --draft-model")
    if draft_model and not any(settings.generate):
        raise EvalError("--draft-model goes with -g: a prompt is read without it")
    if draft_model and settings.batch_size != [1]:
        raise EvalError("--draft-model goes with -b 1: mlx-lm has no speculative decoding in batches")
    described_machine = machine.describe()
    loaded = [models.load(model, revision, adapter_path), *([models.load(draft_model)] if draft_model else [])]
    generation.require(loaded, cases)
    runner.say_what_bounds(described_machine)

    work = generation.tests(loaded, cases, settings)
    measured, stopped = runner.collect(work, "trials, off and on", len(cases) * settings.repetitions)
    result = Result(
        model=loaded[0].described,
        draft_model=loaded[1].described if draft_model else None,
        settings=settings,
        results=list({test.test: test for test, _ in measured}.values()),
        flash=Flash.sum(flash for _, flash in measured),
        interrupted=stopped is not None,
        machine=described_machine,
    )
    outputs.deliver(page.description(result))
    runner.end(stopped)
