"""Does the work of `flash-eval speed`: prompts and generation as mlx-lm runs them, with the patch off and on.

mlx-lm's `generate_step` runs one sequence. Its `PromptProcessingBatch` and `GenerationBatch` run several at once, and
its `speculative_generate_step` runs a draft model. So prefill steps, caches and asynchronous evaluation are mlx-lm's
own. `BatchGenerator` is not used, because its queue and its merging of caches would only add time.
"""

import copy
import inspect
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from flashattn_core.arguments import Precision
from mlx.utils import tree_map
from mlx_lm.generate import PromptProcessingBatch, generate_step, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from msgspec.structs import asdict

from flash_evals.results.arms import Arm, Flash, Trial
from flash_evals.results.errors import EvalError, failing
from flash_evals.results.speed_result import Case, Settings, Speed, Test
from flash_evals.work import caches
from flash_evals.work.measure import attention_share, failures, run, trial
from flash_evals.work.models import LoadedModel

PREFILL_STEP_SIZE: int = inspect.signature(generate_step).parameters["prefill_step_size"].default  # mlx-lm's default

Cache = list[Any]  # one object per layer, which holds the layer's keys and values
Guesses = tuple[int, int]  # how many tokens the draft model guessed, and how many of these were accepted


def require(models: Sequence[LoadedModel], cases: Sequence[Case]) -> None:
    """Raises EvalError if a case is too long for a model, or mlx-lm cannot run it with these models."""
    loaded, *draft = models
    for case in cases:
        drafting = draft if case.kind == "generation" else []
        for model in (loaded, *drafting):
            # In the last round with a draft model, the model reads one position more than without a draft model.
            model.require_positions(case.depth + case.tokens + len(drafting), str(case))
    if any(case.batch_size > 1 for case in cases):
        for layer in make_prompt_cache(loaded.model):
            if not hasattr(layer, "merge"):
                raise EvalError(f"-b: mlx-lm cannot batch the cache of {loaded.name}, a {type(layer).__name__}")
    for model in draft:
        theirs, own = model.tokenizer.vocab_size, loaded.tokenizer.vocab_size
        if theirs != own:
            expected = f"expected the tokenizer of {loaded.name}, with {own:,}"
            raise EvalError(f"--draft-model {model.name} has a tokenizer of {theirs:,} tokens, {expected}")
        for each in models:  # mlx-lm checks only the first model
            if not can_trim_prompt_cache(make_prompt_cache(each.model)):
                raise EvalError(f"--draft-model: mlx-lm cannot remove rejected tokens from the cache of {each.name}")


def tests(
    models: Sequence[LoadedModel], cases: Sequence[Case], settings: Settings
) -> Generator[tuple[Test, Flash], None, None]:
    """After each repetition of a case, yields the case's results so far and the attention calls of that repetition.

    Before the repetitions, each arm runs the case twice: once to warm up, and once to time attention. An arm that fails
    in its warm-up, for example for lack of memory, is not measured. `models` has the model and, if there is one, the
    draft model. Raises EvalError if a case fails later, or with both arms.
    """
    random = np.random.default_rng(settings.seed)
    vocabulary = min(model.vocabulary for model in models)
    filled: dict[int, list[Cache]] = {}  # depth -> one cache per model; all have the same tokens

    def work() -> Callable[[], Guesses]:
        return prepared(models, settings.num_draft_tokens, case, tokens, filled[case.depth])

    def share(name: Arm) -> float | None:
        return None if name in failed else attention_share(name, work(), settings.precision)

    def speed(flash: Flash, name: Arm) -> Speed | None:
        if name in failed:
            return None
        (drafted, accepted), took = run(name, work(), case.tokens * case.batch_size, flash, settings.precision)
        return Speed(**asdict(took), drafted=drafted, accepted=accepted)

    for case in cases:
        if case.depth not in filled:
            with failing(f"filling the cache with {case.depth} tokens fails"):
                held = random.integers(vocabulary, size=case.depth)
                kv = {name: getattr(settings, name) for name in caches.OPTIONS}
                filled = {case.depth: [filled_cache(model, held, settings.precision, **kv) for model in models]}
        tokens = random.integers(vocabulary, size=(case.batch_size, case.tokens if case.kind == "prompt" else 1))
        failed: dict[Arm, str] = {}
        failed.update(failures(str(case), partial(speed, Flash())))
        attention = trial(str(case), 1, share)
        trials: list[Trial[Speed | None]] = []
        for repetition in range(settings.repetitions):
            flash = Flash()
            trials.append(trial(str(case), repetition, partial(speed, flash)))
            yield Test.of(case, attention, [*trials], failed), flash


def prepared(
    models: Sequence[LoadedModel], ahead: int | None, case: Case, tokens: np.ndarray, filled: Sequence[Cache]
) -> Callable[[], Guesses]:
    """Copies the cache, and returns a function that runs one trial with the copy. The copy is made here, because only
    the returned function is timed.

    tokens: shape (sequences, tokens to read). ahead: how many tokens the draft model guesses at a time; None without a
    draft model.
    """
    steps = 0 if case.kind == "prompt" else case.tokens - 1
    if case.batch_size > 1:
        return _batch(models[0], tokens, steps, filled[0])
    if ahead and case.kind == "generation":
        own = [layer for cache in filled for layer in _copy(cache)]
        return partial(_speculate, models, ahead, tokens[0], case.tokens, own)
    return partial(_generate, models[0], tokens[0], steps, _copy(filled[0]))


def _generate(loaded: LoadedModel, tokens: np.ndarray, steps: int, cache: Cache) -> Guesses:
    """Reads `tokens`, generates one new token, and then generates `steps` more."""
    stream = mx.default_stream(mx.default_device())
    for _ in generate_step(mx.array(tokens), loaded.model, stream, max_tokens=steps, prompt_cache=cache):
        pass
    mx.synchronize(stream)  # the last step may still run when the generator ends
    return 0, 0


def _batch(loaded: LoadedModel, tokens: np.ndarray, steps: int, cache: Cache) -> Callable[[], Guesses]:
    """Returns a function that does what `_generate` does, for all sequences at once. Each one has a copy of `cache`."""
    count, more = len(tokens), steps + 2  # more than is generated: the batch drops sequences that reach max_tokens
    batch = PromptProcessingBatch(loaded.model, list(range(count)), [cache] * count, max_tokens=[more] * count)
    mx.eval([layer.state for layer in batch.prompt_cache])

    def work() -> Guesses:
        generation = batch.generate(tokens.tolist())
        for _ in range(steps):
            generation.next()
        mx.synchronize()
        return 0, 0

    return work


def _speculate(models: Sequence[LoadedModel], ahead: int, tokens: np.ndarray, count: int, caches: Cache) -> Guesses:
    """Generates `count` tokens; the draft model guesses up to `ahead` of them at a time."""
    model, draft = (loaded.model for loaded in models)
    options: dict[str, Any] = {"num_draft_tokens": ahead, "max_tokens": count, "prompt_cache": caches}
    stream = mx.default_stream(mx.default_device())
    steps = speculative_generate_step(mx.array(tokens), model, draft, stream, **options)
    guessed = [drafted for _, _, drafted in steps]
    mx.synchronize(stream)
    # A round of guesses ends with a token of the large model itself. The token after that begins the next round.
    rounds = [0, *(at for at in range(1, len(guessed)) if not guessed[at - 1])]
    return sum(min(ahead, count - at) for at in rounds), sum(guessed)


def filled_cache(loaded: LoadedModel, tokens: np.ndarray, precision: Precision = "input", **kv: Any) -> Cache:
    """Makes a cache with these tokens, for both arms. The patch is on while it is filled. Filling is not timed."""
    cache = caches.make(loaded, **kv)
    if len(tokens):
        run("on", partial(_generate, loaded, tokens, 0, cache), len(tokens), Flash(), precision)
    return cache


def _copy(cache: Cache) -> Cache:
    """Copies a cache for one trial, because the trial appends to it.

    A deep copy alone would share the arrays' buffers with the original. The first append would then copy them while
    the clock runs.
    """
    copied = copy.deepcopy(cache)
    for layer in copied:
        arrays = tree_map(lambda value: value + 0 if isinstance(value, mx.array) else value, vars(layer))
        layer.__dict__.update(arrays)
        mx.eval(arrays)
    return copied
