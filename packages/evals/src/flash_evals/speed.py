"""`flash-eval speed`: prompt and generation tokens per second at several depths, patch off and on.

It drives mlx-lm's own `generate_step`, so prefill steps, cache and asynchronous evaluation are its.
"""

import copy
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import click
import mlx.core as mx
import numpy as np

from flash_evals import machine, models, options, output
from flash_evals.errors import EvalError
from flash_evals.measure import ARMS, Arm, Flash, Trial, arms, memory_method, run
from flash_evals.output import Outputs, Table

Kind = Literal["prompt", "generation"]


class Case(NamedTuple):
    kind: Kind
    tokens: int  # of the prompt, or generated
    depth: int  # tokens that are in the KV cache before

    def __str__(self) -> str:
        name = f"{'pp' if self.kind == 'prompt' else 'tg'}{self.tokens}"
        return f"{name} @ d{self.depth}" if self.depth else name


@dataclass(frozen=True)
class Pair:
    """One repetition of a test, by both arms."""

    test: Case
    order: tuple[Arm, Arm]
    trials: dict[Arm, Trial]
    flash: Flash


def _lengths_option(short: str, name: str, default: str, text: str) -> Callable[..., Any]:
    check = options.listed(options.whole_number, "numbers of tokens")
    return click.option(short, name, default=default, show_default=True, metavar="N,...", callback=check, help=text)


@click.command("speed")
@options.model
@options.adapter_path
@_lengths_option("-p", "--prompt", "512", "Prompt lengths in tokens; 0 for none.")
@_lengths_option("-g", "--generate", "32", "Numbers of tokens to generate; 0 for none.")
@_lengths_option("-d", "--depth", "0,2048", "Numbers of tokens that are in the KV cache before.")
@options.repetitions
@options.seed("Of the random tokens in the prompts.")
@options.outputs
def command(
    model: str | None,
    revision: str | None,
    adapter_path: str | None,
    prompt: list[int],
    generate: list[int],
    depth: list[int],
    repetitions: int,
    seed: int,
    outputs: Outputs,
) -> None:
    """Prompt and generation tokens per second, patch off against patch on.

    \b
    pp512          a prompt of 512 tokens, up to the first new token
    tg32 @ d2048   32 tokens, one by one, with 2048 in the KV cache before
    t/s            mean of the repetitions ± their standard deviation
    on/off         ratio of the medians
    peak memory    what a trial needs on top of the model and the filled
                   cache, at most

    Both arms see the same random tokens and the same cache, and take turns in going first. Loading and
    filling the cache are not part of the time. Ctrl-C ends the run and reports the finished trials.
    """
    kinds: tuple[tuple[Kind, list[int]], ...] = (("prompt", prompt), ("generation", generate))
    tests = [Case(kind, tokens, at) for at in depth for kind, lengths in kinds for tokens in lengths if tokens]
    if not tests:
        raise EvalError("nothing to measure: -p and -g are both 0")
    described_machine = machine.describe()
    loaded = models.load(model, revision, adapter_path)
    for test in tests:
        loaded.require_positions(test.tokens + test.depth, str(test))

    pairs: list[Pair] = []
    total = len(tests) * repetitions
    try:
        with output.progress() as progress:
            bar = progress.add_task("trials, off and on", total=total)
            for pair in measured(loaded, tests, repetitions, seed):
                pairs.append(pair)
                progress.advance(bar)
    except KeyboardInterrupt:
        if not pairs:
            raise

    result: dict[str, Any] = {
        "command": "speed",
        "model": loaded.describe(),
        "settings": {
            "prompt": prompt,
            "generate": generate,
            "depth": depth,
            "repetitions": repetitions,
            "seed": seed,
            "prefill_step_size": _prefill_step_size(),
            "memory": memory_method(),
        },
        "results": [summary(test, list(of_test)) for test, of_test in groupby(pairs, key=lambda pair: pair.test)],
        "flash": sum((pair.flash for pair in pairs), start=Flash()).describe(),
        "interrupted": len(pairs) < total,
        "machine": described_machine,
    }
    outputs.deliver(result, csv_rows(result["results"]), partial(render, result))
    if result["interrupted"]:
        sys.exit(130)


def measured(loaded: models.LoadedModel, tests: Sequence[Case], repetitions: int, seed: int) -> Iterator[Pair]:
    """Runs each test that often under both arms, after a pair of trials that warms up and is not counted."""
    random = np.random.default_rng(seed)
    filled: dict[int, Any] = {}
    for test in tests:
        if test.depth not in filled:
            filled = {test.depth: _cache(loaded, random.integers(loaded.vocabulary, size=test.depth))}
        read, steps = (test.tokens, 0) if test.kind == "prompt" else (1, test.tokens - 1)
        tokens = random.integers(loaded.vocabulary, size=read)
        for repetition in range(-1, repetitions):
            trials: dict[Arm, Trial] = {}
            flash, order = Flash(), arms(repetition)
            for name in order:
                work = partial(_generate, loaded, tokens, steps, _copy(filled[test.depth]))
                _, trials[name] = run(name, work, flash)
            if repetition >= 0:
                yield Pair(test, order, trials, flash)


def _generate(loaded: models.LoadedModel, tokens: np.ndarray, steps: int, cache: Any) -> None:
    """Processes the tokens up to the first new one, then takes that many further decode steps."""
    from mlx_lm.generate import generate_step

    stream = mx.default_stream(mx.default_device())
    for _ in generate_step(mx.array(tokens), loaded.model, stream, max_tokens=steps, prompt_cache=cache):
        pass
    mx.synchronize(stream)  # the last step is still under way when the generator ends


def _prefill_step_size() -> int:
    from mlx_lm.generate import generate_step

    return int(inspect.signature(generate_step).parameters["prefill_step_size"].default)


def _cache(loaded: models.LoadedModel, tokens: np.ndarray) -> Any:
    """A KV cache that holds these tokens; filled by the on arm, as its origin costs neither arm any time."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(loaded.model)
    if len(tokens):
        run("on", partial(_generate, loaded, tokens, 0, cache), Flash())
    return cache


def _copy(cache: Any) -> Any:
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


def summary(test: Case, pairs: Sequence[Pair]) -> dict[str, Any]:
    """One test in the result file."""
    trials: list[dict[str, Any]] = [
        {"order": list(pair.order)} | {name: trial.describe(test.tokens) for name, trial in pair.trials.items()}
        for pair in pairs
    ]
    speeds: dict[Arm, list[float]] = {name: [trial[name]["tokens_per_s"] for trial in trials] for name in ARMS}
    return {
        "test": str(test),
        **test._asdict(),
        **{
            name: {
                "tokens_per_s": statistics.mean(speeds[name]),
                "tokens_per_s_sd": statistics.stdev(speeds[name]) if len(trials) > 1 else None,
                "tokens_per_s_median": statistics.median(speeds[name]),
                "peak_memory_mb": max(trial[name]["peak_memory_mb"] for trial in trials),
            }
            for name in ARMS
        },
        "ratio": statistics.median(speeds["on"]) / statistics.median(speeds["off"]),
        "trials": trials,
    }


def csv_rows(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each trial of each arm, in the order they ran."""
    return [
        {
            **{key: result[key] for key in ("test", "kind", "tokens", "depth")},
            "repetition": number,
            "arm": name,
            **trial[name],
        }
        for result in results
        for number, trial in enumerate(result["trials"])
        for name in trial["order"]
    ]


def render(result: dict[str, Any], table: Table = output.columns) -> str:
    """The result as a page of text."""
    model, settings = result["model"], result["settings"]
    header = (
        f"{models.title(model)} · "
        f"{settings['repetitions']} repetitions, off and on taking turns · {result['machine']['device']}"
    )
    rows = [("test", "patch off t/s", "patch on t/s", "on/off", "peak memory off", "on", "on/off")]
    for test in result["results"]:
        off, on = test["off"], test["on"]
        rows.append(
            (
                test["test"],
                *(_rate(arm) for arm in (off, on)),
                f"{test['ratio']:.2f}x",
                *(f"{arm['peak_memory_mb']:,.1f} MB" for arm in (off, on)),
                output.ratio(on["peak_memory_mb"], off["peak_memory_mb"]),
            )
        )
    flash = Flash.of(result["flash"])
    lines = [header, "", table(rows), "", str(flash)]
    if not flash.calls:
        lines.append("The patch never ran: both columns are MLX's own attention.")
    if result["machine"]["blas"] == "reference":
        lines.append(machine.REFERENCE_BLAS)
    if result["interrupted"]:
        lines.append("Interrupted; the figures are of the trials that were finished.")
    return "\n".join(lines)


def _rate(arm: dict[str, Any]) -> str:
    rate, sd = arm["tokens_per_s"], arm["tokens_per_s_sd"]
    digits = 0 if rate >= 100 else 1
    return f"{rate:,.{digits}f}" + (f" ± {sd:,.{digits}f}" if sd is not None else "")
