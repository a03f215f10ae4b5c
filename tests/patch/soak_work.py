"""The soak's pieces of work. Each piece gives the same numbers with the patch off and on, up to rounding errors."""

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from flash_evals.work import data, models, plan, scoring, training
from mlx_lm.generate import batch_generate, stream_generate
from mlx_lm.models.cache import make_prompt_cache

from tests.patch.model_configs import config, random_model

OTHER_TYPES = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v2", "cohere2", "olmo2")
TOLERANCE = 1e-3  # allowed difference for float32 models, relative to max(1, the largest number)
QUANTISED = 5e-2  # for 8-bit caches: a rounding error may move a quantised key by 1/255 of its range


class Broken(AssertionError):
    """A check of the soak has failed."""


@dataclass(frozen=True)
class Result:
    """The numbers and tokens that a piece of work computed with the patch off, or with it on."""

    numbers: np.ndarray  # losses, logits, or the log-probability of each token
    tokens: np.ndarray | None = None  # greedily generated; several sequences are concatenated


Run = Callable[[list[nn.Module]], Result]


@dataclass(frozen=True)
class Work:
    """Work to do with the patch off and on. `run` gets the models that `models` returns."""

    models: Callable[[], list[nn.Module]]
    run: Run
    tolerance: float = TOLERANCE


class Kinds:
    """The kinds of work. Each method chooses a piece of work with `rng`. The work itself uses no random numbers."""

    def __init__(self, other_types: Sequence[str]) -> None:
        self.demo = models.load(None)
        rules = plan.Rules(64, 32, "rolling", "joined", "auto", None)
        self.plan = plan.make(self.demo, data.load("pydoc"), rules)
        self.smaller = random_model("qwen2", {**self.demo.config, "num_hidden_layers": 1})  # a draft model
        self.others = {name: random_model(name, config(name)) for name in other_types}

    def _prompt(self, rng: random.Random, longest: int = 40) -> list[int]:
        start = rng.randrange(len(self.plan.ids) - longest)
        return self.plan.ids[start : start + rng.randint(2, longest)].tolist()

    def _demo(self, run: Callable[[nn.Module], Result], tolerance: float = TOLERANCE) -> Work:
        return Work(lambda: [self.demo.model], lambda of: run(of[0]), tolerance)

    def _streamed(self, rng: random.Random, tolerance: float = TOLERANCE, **options: Any) -> Work:
        prompt, count = self._prompt(rng), rng.randint(4, 16)
        return self._demo(
            lambda model: _answer(stream_generate(model, self.demo.tokenizer, prompt, count, **options)), tolerance
        )

    def stream(self, rng: random.Random) -> Work:
        return self._streamed(rng, prefill_step_size=rng.choice((8, 2048)))

    def rotating_cache(self, rng: random.Random) -> Work:
        return self._streamed(rng, max_kv_size=rng.randint(8, 32))

    def quantised_cache(self, rng: random.Random) -> Work:
        return self._streamed(rng, QUANTISED, kv_bits=8, kv_group_size=32, quantized_kv_start=rng.choice((0, 16)))

    def draft(self, rng: random.Random) -> Work:
        prompt, count, drafted = self._prompt(rng), rng.randint(4, 16), rng.randint(1, 6)

        def run(of: list[nn.Module]) -> Result:
            model, draft = of
            return _answer(stream_generate(model, self.demo.tokenizer, prompt, count, draft, num_draft_tokens=drafted))

        return Work(lambda: [self.demo.model, self.smaller], run)

    def batch(self, rng: random.Random) -> Work:
        prompts = [self._prompt(rng) for _ in range(rng.randint(2, 5))]
        counts = [rng.randint(3, 12) for _ in prompts]

        def run(model: nn.Module) -> Result:
            options = {"return_token_ids": True, "return_logprobs": True, "completion_batch_size": 3}
            answer = batch_generate(model, self.demo.tokenizer, prompts, max_tokens=counts, **options)
            rows = zip(answer.token_ids, answer.logprobs, strict=True)
            return _tokens([pair for row in rows for pair in zip(*row, strict=True)])

        return self._demo(run)

    def perplexity(self, rng: random.Random) -> Work:
        first = rng.randrange(len(self.plan.windows) - 4)
        windows = self.plan.windows[first : first + rng.randint(1, 4)]

        def run(model: nn.Module) -> Result:
            logits = model(mx.array(np.stack([self.plan.ids[w.begin : w.end] for w in windows])))
            mx.eval(logits)
            costs = []
            for row, w in zip(logits, windows, strict=True):
                targets = self.plan.ids[w.first_scored : w.end + 1]
                costs.append(scoring.token_nll(np.array(row[w.first_scored - w.begin - 1 :]), targets))
            return Result(np.concatenate(costs))

        return self._demo(run)

    def lora(self, rng: random.Random) -> Work:
        layers, checkpoints = rng.randint(1, 2), rng.random() < 0.3
        length, seed = rng.choice((17, 32)), rng.randrange(1000)
        batch = training.make_batch(np.random.default_rng(seed).integers(self.demo.vocabulary, size=(2, length + 1)))

        def run(of: list[nn.Module]) -> Result:
            with training.trainable(of[0], layers, 4, checkpoints, seed):
                step = training.trainee(of[0], of[0].trainable_parameters())
                return Result(np.array([step(*batch) for _ in range(3)]))

        return Work(lambda: [copy.deepcopy(self.demo.model)], run)

    def other_type(self, rng: random.Random) -> Work:
        """The logits of a prompt and of some tokens after it."""
        model = self.others[rng.choice(list(self.others))]
        prompt, steps, batch = rng.randint(2, 30), rng.randint(0, 6), rng.randint(1, 2)
        tokens = mx.array(np.random.default_rng(rng.randrange(1000)).integers(90, size=(batch, prompt + steps)))

        def run(of: list[nn.Module]) -> Result:
            cache = make_prompt_cache(of[0])
            parts = [of[0](tokens[:, :prompt], cache=cache)]
            parts += [of[0](tokens[:, i : i + 1], cache=cache) for i in range(prompt, prompt + steps)]
            return Result(np.array(mx.concatenate(parts, axis=1)))

        return Work(lambda: [model], run)


KINDS: dict[str, Callable[[Kinds, random.Random], Work]] = {
    "stream_generate": Kinds.stream,
    "batch_generate": Kinds.batch,
    "draft model": Kinds.draft,
    "quantised cache": Kinds.quantised_cache,
    "rotating cache": Kinds.rotating_cache,
    "perplexity": Kinds.perplexity,
    "LoRA steps": Kinds.lora,
    "another model type": Kinds.other_type,
}


def _tokens(pairs: Sequence[tuple[int, float]]) -> Result:
    return Result(np.array([p for _, p in pairs]), np.array([token for token, _ in pairs]))


def _answer(responses: Iterable[Any]) -> Result:
    return _tokens([(r.token, r.logprobs[r.token].item()) for r in responses])


def difference(off: Result, on: Result, tolerance: float) -> tuple[float, bool]:
    """Returns (difference, whether a token differs). Raises Broken if the difference exceeds `tolerance`.

    The difference is the largest |off - on|, divided by max(1, the largest |off|). A token may differ only in a
    near-tie: the log-probabilities of the two tokens must agree within `tolerance`. Numbers after the first differing
    token are ignored, because the texts differ from there on. Also raises Broken if the shapes differ, or if numbers
    that are not finite stand in different places.
    """
    one, other, tie = off.numbers, on.numbers, False
    if off.tokens is not None and on.tokens is not None:
        common = min(len(off.tokens), len(on.tokens))
        differs = np.flatnonzero(off.tokens[:common] != on.tokens[:common])
        if len(differs):
            tie, one, other = True, one[: differs[0] + 1], other[: differs[0] + 1]
    if one.shape != other.shape:
        raise Broken(f"{one.shape} numbers with the patch off, {other.shape} with it on")
    if not np.array_equal(np.isfinite(one), np.isfinite(other)):
        raise Broken("numbers that are not finite differ")
    one, other = one[np.isfinite(one)], other[np.isfinite(other)]
    worst = float(np.max(np.abs(one - other)) / max(1.0, np.max(np.abs(one)))) if one.size else 0.0
    if worst > tolerance:
        raise Broken(f"the patch changes a result by {worst:.1e}, more than {tolerance:.0e}")
    return worst, tie
