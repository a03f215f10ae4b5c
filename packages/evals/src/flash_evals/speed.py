"""`flash-eval speed`: prompt and generation tokens per second at several depths, patch off and on."""

from collections.abc import Sequence

import click

from flash_evals import generation, machine, models, options, runner, speed_result
from flash_evals.errors import EvalError
from flash_evals.generation import Case, Draft, Kind
from flash_evals.measure import Flash, memory_method
from flash_evals.output import Outputs
from flash_evals.page import speed as page
from flash_evals.speed_result import Result, Settings

NUM_DRAFT_TOKENS = 3  # as in mlx_lm.generate


def _pause(_: click.Context, parameter: click.Parameter, value: float) -> float:
    if not 0 <= value <= 3600:
        raise EvalError(f"{parameter.opts[0]} must be between 0 and 3600 seconds, not {value:g}")
    return value


@click.command("speed")
@options.model
@options.adapter_path
@options.numbers("-p", "--prompt", of="tokens", least=0, default="512", text="Prompt lengths in tokens; 0 for none.")
@options.numbers(
    "-g", "--generate", of="tokens", least=0, default="32", text="Numbers of tokens to generate; 0 for none."
)
@options.numbers(
    "-d", "--depth", of="tokens", least=0, default="0,2048", text="Numbers of tokens that are in the KV cache before."
)
@options.numbers(
    "-b",
    "--batch-size",
    of="sequences",
    least=1,
    default="1",
    text="Sequences at once, each with a prompt of its own; several go through mlx-lm's batch generator.",
)
@click.option(
    "--draft-model",
    metavar="FOLDER|HUB_ID",
    help="Generate by speculative decoding: this smaller model guesses tokens ahead.",
)
@click.option(
    "--num-draft-tokens",
    type=int,
    callback=options.at_least(1),
    help=f"Tokens that the draft model guesses at a time.  [default: {NUM_DRAFT_TOKENS}]",
)
@options.repetitions(5, "Trials of each test and arm; one more to warm up and one to watch attention are not counted.")
@click.option(
    "--delay",
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    callback=_pause,
    help="Wait between any two trials, for a machine that throttles.",
)
@options.seed("Of the random tokens in the prompts.")
@options.blas
@options.outputs
def command(
    model: str | None,
    revision: str | None,
    adapter_path: str | None,
    prompt: list[int],
    generate: list[int],
    depth: list[int],
    batch_size: list[int],
    draft_model: str | None,
    num_draft_tokens: int | None,
    repetitions: int,
    delay: float,
    seed: int,
    outputs: Outputs,
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
                   fallbacks, which are calls left to MLX, with the reason

    Both arms see the same random tokens and the same cache, and take turns in going first. The time does not include
    loading and filling the cache. Ctrl-C ends the run and reports the finished trials.
    """
    kinds: dict[Kind, list[int]] = {"prompt": prompt, "generation": generate}
    tests = [
        Case(kind, tokens, at, size)
        for at in depth
        for size in batch_size
        for kind, lengths in kinds.items()
        for tokens in lengths
        if tokens
    ]
    if not tests:
        raise EvalError("nothing to measure: -p and -g are both 0")
    if num_draft_tokens and not draft_model:
        raise EvalError("--num-draft-tokens goes with --draft-model")
    if draft_model and not any(generate):
        raise EvalError("--draft-model goes with -g: a prompt is read without it")
    if draft_model and batch_size != [1]:
        raise EvalError("--draft-model goes with -b 1: mlx-lm has no speculative decoding in batches")
    described_machine = machine.describe()
    loaded = models.load(model, revision, adapter_path)
    draft = Draft(models.load(draft_model), num_draft_tokens or NUM_DRAFT_TOKENS) if draft_model else None
    _check_models(loaded, draft, tests)
    settings: Settings = options.given(
        Settings,
        num_draft_tokens=draft.tokens if draft else None,
        prefill_step_size=generation.prefill_step_size(),
        memory=memory_method(),
    )
    machine.say_what_bounds(described_machine)

    work = generation.repetitions(loaded, draft, tests, repetitions, seed, delay)
    measured, stopped = runner.collect(work, "trials, off and on", len(tests) * repetitions)
    result = Result(
        model=loaded.described,
        draft_model=draft.loaded.described if draft else None,
        settings=settings,
        results=speed_result.tests(measured),
        flash=Flash.sum(each.flash for each in measured),
        interrupted=stopped is not None,
        machine=described_machine,
    )
    outputs.deliver(page.description(result), speed_result.csv_rows(result))
    runner.end(stopped)


def _check_models(loaded: models.LoadedModel, draft: Draft | None, tests: Sequence[Case]) -> None:
    """Raises EvalError for what the models cannot do, before they do anything."""
    for test in tests:
        drafting = draft if test.kind == "generation" else None
        for each in (loaded, drafting.loaded) if drafting else (loaded,):
            # The last round verifies as many guesses as tokens are missing, behind the token that was found before.
            each.require_positions(test.depth + test.tokens + bool(drafting), str(test))
    own = generation.empty_cache(loaded)
    if any(test.batch_size > 1 for test in tests):
        for layer in own:
            if not hasattr(layer, "merge"):
                raise EvalError(f"-b: mlx-lm cannot batch the {type(layer).__name__} of {loaded.name}")
    if not draft:
        return
    sizes = [each.tokenizer.vocab_size for each in (loaded, draft.loaded)]
    if sizes[0] != sizes[1]:
        raise EvalError(
            f"--draft-model {draft.loaded.name} has a tokenizer of {sizes[1]:,} tokens, expected that of "
            f"{loaded.name}, with {sizes[0]:,}"
        )
    for layer in own + generation.empty_cache(draft.loaded):
        if not layer.is_trimmable():
            raise EvalError(f"--draft-model: mlx-lm cannot take tokens back out of a {type(layer).__name__}")
