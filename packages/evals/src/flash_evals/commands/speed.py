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
@options.numbers("-p", "--prompt", of="tokens", least=0, default="512", text="Prompt lengths in tokens; 0: no prompts.")
@options.numbers("-g", "--generate", of="tokens", least=0, default="32", text="Tokens to generate; 0: no generation.")
@options.numbers(
    "-d", "--depth", of="tokens", least=0, default="0,2048", text="Tokens in the KV cache before the test."
)
@options.numbers("-b", "--batch-size", of="sequences", least=1, default="1", text="Sequences in one batch.")
@click.option(
    "--draft-model", metavar="FOLDER|HUB_ID", help="Use speculative decoding: this smaller model guesses tokens."
)
@options.number(
    "--num-draft-tokens", least=1, type=int, text="Tokens that the draft model guesses at a time.  [default: 3]"
)
@options.repetitions(5, "Trials of each test and arm, after one that warms up and one that times attention.")
@options.seed("Seed of the random tokens in the prompts.")
@options.kv_bits
@options.kv_group_size
@options.quantized_kv_start
@options.precision("input", "the patch")
@options.blas
@options.outputs
def command(
    model: str | None,
    revision: str | None,
    adapter_path: str | None,
    draft_model: str | None,
    num_draft_tokens: int | None,
    **_: object,  # the other options, which are passed on to the settings unchanged
) -> None:
    """Compare prompt and generation tokens per second, patch off and patch on.

    \b
    pp512          a prompt of 512 tokens, up to the first new token
    tg32 @ d2048   32 tokens generated one by one, after 2048 in the KV cache
    tg32 x4        32 tokens generated for each of 4 sequences at once
    t/s            tokens of all sequences per second: mean of the
                   repetitions ± their standard deviation; or the error of
                   an arm that cannot run the test
    on/off         median t/s or peak memory with the patch on, divided by that
                   with the patch off; ~ marks no clear difference: the
                   trials overlap or are few
    peak memory    the most that a trial needs on top of the model and the
                   filled cache
    attention      attention's share of the time, from one more trial of
                   each arm. That trial waits before and after each call
                   of attention, which makes short calls longer. A – means
                   that the model computes attention together with its
                   projections.
    accepted       share of the draft model's tokens that the model would
                   have chosen too. Prompts do not use the draft model.
    flash:         with the patch on: calls of each flash kernel;
                   fallbacks (calls that flash attention cannot compute)
                   with the reason; and calls left to MLX's own attention,
                   because it is faster

    Both arms, patch off and patch on, see the same random tokens and the same cache, and take turns at going first.
    The times leave out loading the model and filling the cache. Ctrl-C ends the run and reports the finished
    trials.
    """
    from flash_evals.work import generation  # imported here, so that -h need not wait for mlx-lm

    settings: Settings = options.given(
        Settings,
        num_draft_tokens=(num_draft_tokens or 3) if draft_model else None,  # 3: mlx_lm.generate's default
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
        raise EvalError("--num-draft-tokens needs --draft-model")
    if draft_model and not any(settings.generate):
        raise EvalError("--draft-model needs -g: prompts do not use the draft model")
    if draft_model and settings.batch_size != [1]:
        raise EvalError("--draft-model needs -b 1: mlx-lm has no speculative decoding in batches")
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
    options.given(Outputs).deliver(page.description(result))
    runner.end(stopped)
