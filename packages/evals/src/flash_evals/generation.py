"""The work of `speed`: prompts and generation as mlx-lm runs them, with the patch off and on.

One sequence goes through mlx-lm's `generate_step`, several at once through the two classes that its `BatchGenerator`
is made of, and a draft model through `speculative_generate_step`: prefill steps, caches and asynchronous evaluation
are mlx-lm's. `BatchGenerator` itself would only add a queue, and the merging of caches to what is timed.
"""

import copy
import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
from msgspec.structs import asdict

from flash_evals.attention_share import attention_share
from flash_evals.errors import failing
from flash_evals.measure import ARMS, Arm, Flash, Measurement, Trial, arms, run
from flash_evals.models import LoadedModel
from flash_evals.record import Count

Kind = Literal["prompt", "generation"]
Cache = list[Any]  # a layer's keys and values each
Guesses = tuple[int, int]  # of a draft model: drafted, accepted


class Case(NamedTuple):
    kind: Kind
    tokens: int  # of the prompt, or generated; of each sequence
    depth: int  # tokens that are in the KV cache before, of each sequence
    batch_size: int  # sequences at once

    def __str__(self) -> str:
        name = f"{'pp' if self.kind == 'prompt' else 'tg'}{self.tokens}"
        many = f" x{self.batch_size}" if self.batch_size > 1 else ""
        return f"{name}{many}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class Draft:
    """The small model that guesses tokens ahead, for the large one to verify at once."""

    loaded: LoadedModel
    tokens: int  # that it guesses at a time


class Speed(Measurement):
    """Of one arm in one trial."""

    drafted: Count  # tokens that the draft model has guessed
    accepted: Count


class Repetition(NamedTuple):
    """A trial of a test."""

    test: Case
    attention: dict[Arm, float | None]  # its share of the time, the same for all repetitions
    trial: Trial[Speed]
    flash: Flash


def repetitions(
    loaded: LoadedModel, draft: Draft | None, tests: Sequence[Case], times: int, seed: int, delay: float
) -> Generator[Repetition, None, None]:
    """Runs each test that often under both arms, after a pair of trials that warms up and a pair that is watched for
    attention's share; neither is counted. Between two trials it waits for `delay` seconds.

    Raises EvalError if the model, its cache or the memory does not take a test.
    """
    random = np.random.default_rng(seed)
    models = [loaded, *([draft.loaded] if draft else [])]
    vocabulary = min(model.vocabulary for model in models)
    filled: dict[int, list[Cache]] = {}  # for each of the models, with the same tokens
    waits = 0.0

    def trial(name: Arm, measure: Callable[..., Any], *others: Any) -> Any:
        nonlocal waits
        time.sleep(waits)
        waits = delay
        with failing(f"{test} fails with the patch {name}"):
            return measure(name, prepared(loaded, draft, test, tokens, filled[test.depth]), *others)

    for test in tests:
        if test.depth not in filled:
            with failing(f"filling the cache with {test.depth} tokens fails"):
                held = random.integers(vocabulary, size=test.depth)
                filled = {test.depth: [filled_cache(model, held) for model in models]}
        tokens = random.integers(vocabulary, size=(test.batch_size, test.tokens if test.kind == "prompt" else 1))
        of_all = test.tokens * test.batch_size
        for name in ARMS:
            trial(name, run, of_all, Flash())
        attention = {name: trial(name, attention_share) for name in arms(1)}
        for repetition in range(times):
            measured: dict[Arm, Speed] = {}
            flash, order = Flash(), arms(repetition)
            for name in order:
                (drafted, accepted), measurement = trial(name, run, of_all, flash)
                measured[name] = Speed(**asdict(measurement), drafted=drafted, accepted=accepted)
            yield Repetition(test, attention, Trial(**measured, order=order), flash)


def prepared(
    loaded: LoadedModel, draft: Draft | None, test: Case, tokens: np.ndarray, filled: Sequence[Cache]
) -> Callable[[], Guesses]:
    """One trial's work on the tokens, (sequences, read). Its cache is its own, and ready before the clock starts."""
    steps = 0 if test.kind == "prompt" else test.tokens - 1
    if test.batch_size > 1:
        return partial(_generate_batch, _batch(loaded, test, filled[0]), tokens, steps)
    if draft and test.kind == "generation":
        own = [layer for cache in filled for layer in _copy(cache)]
        return partial(_speculate, loaded, draft, tokens[0], test.tokens, own)
    return partial(_generate, loaded, tokens[0], steps, _copy(filled[0]))


def _generate(loaded: LoadedModel, tokens: np.ndarray, steps: int, cache: Cache) -> Guesses:
    """Processes the tokens up to the first new one, then takes that many further decode steps."""
    from mlx_lm.generate import generate_step

    stream = mx.default_stream(mx.default_device())
    for _ in generate_step(mx.array(tokens), loaded.model, stream, max_tokens=steps, prompt_cache=cache):
        pass
    mx.synchronize(stream)  # the last step is still under way when the generator ends
    return 0, 0


def _batch(loaded: LoadedModel, test: Case, cache: Cache) -> Any:
    """mlx-lm's batch of sequences that have read the same `cache`, each with a copy of it."""
    from mlx_lm.generate import PromptProcessingBatch

    batch = PromptProcessingBatch(
        loaded.model,
        uids=list(range(test.batch_size)),
        caches=[cache] * test.batch_size,
        prefill_step_size=prefill_step_size(),
        max_tokens=[test.tokens + 1] * test.batch_size,  # a sequence that is done would be taken out of the batch
    )
    mx.eval([layer.state for layer in batch.prompt_cache])
    return batch


def _generate_batch(batch: Any, tokens: np.ndarray, steps: int) -> Guesses:
    """Like `_generate`, of all sequences at once."""
    generation = batch.generate(tokens.tolist())
    for _ in range(steps):
        generation.next()
    mx.synchronize()
    return 0, 0


def _speculate(loaded: LoadedModel, draft: Draft, tokens: np.ndarray, count: int, caches: Cache) -> Guesses:
    """Generates that many tokens, of which the draft model guesses some ahead."""
    from mlx_lm.generate import speculative_generate_step

    stream = mx.default_stream(mx.default_device())
    steps = speculative_generate_step(
        mx.array(tokens),
        loaded.model,
        draft.loaded.model,
        stream,
        num_draft_tokens=draft.tokens,
        max_tokens=count,
        prompt_cache=caches,
    )
    drafted = accepted = 0
    begins = True  # a round of guessing and verifying, which a token of the large model's own ends
    for generated, (_, _, was_drafted) in enumerate(steps):
        if begins:
            drafted += min(draft.tokens, count - generated)
        begins = not was_drafted
        accepted += was_drafted
    mx.synchronize(stream)
    return drafted, accepted


def prefill_step_size() -> int:
    """Tokens that mlx-lm reads at once."""
    from mlx_lm.generate import generate_step

    return int(inspect.signature(generate_step).parameters["prefill_step_size"].default)


def filled_cache(loaded: LoadedModel, tokens: np.ndarray) -> Cache:
    """Filled by the on arm, as its origin costs neither arm any time."""
    cache = empty_cache(loaded)
    if len(tokens):
        run("on", partial(_generate, loaded, tokens, 0, cache), len(tokens), Flash())
    return cache


def empty_cache(loaded: LoadedModel) -> Cache:
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(loaded.model))


def _copy(cache: Cache) -> Cache:
    """The same keys and values for one trial, which will append to them, in buffers of their own.

    A deep copy alone shares the buffers, and the first append would copy them while the clock runs.
    """
    copied = copy.deepcopy(cache)
    for layer in copied:
        for name, value in vars(layer).items():
            if isinstance(value, mx.array):
                setattr(layer, name, value + mx.zeros_like(value))
        mx.eval([value for value in vars(layer).values() if isinstance(value, mx.array)])
    return copied
