"""`flash-eval finetune`: LoRA training steps of several lengths, patch off and on.

`command` reads the options, `training.measured` does the work step by step, `summary` makes the contents of a result
file of it, `render` the page that people read.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import numpy as np

from flash_evals import claims, machine, models, options, output, training
from flash_evals.claims import Ratio
from flash_evals.errors import EvalError
from flash_evals.measure import ARMS, Flash, memory_method
from flash_evals.output import Outputs, Table
from flash_evals.page import drawing
from flash_evals.page.finetune import charts
from flash_evals.page.result_file import Node
from flash_evals.training import Pair, Recipe


@click.command("finetune")
@options.model
@click.option(
    "-p",
    "--seq-len",
    default="512,1024,2048,4096,8192",
    show_default=True,
    metavar="N,...",
    callback=options.listed(options.length, "numbers of tokens"),
    help="Lengths of the sequences in tokens.",
)
@click.option(
    "-b",
    "--batch-size",
    default=1,
    show_default=True,
    callback=options.at_least(1),
    help="Sequences in one step.",
)
@click.option(
    "--num-layers",
    type=int,
    help="Layers that get adapters, counted from the last; -1 is all.  [default: 16, or all if there are fewer]",
)
@click.option("--rank", default=8, show_default=True, callback=options.at_least(1), help="Of the adapters.")
@click.option("--grad-checkpoint", is_flag=True, help="Compute each layer anew for its gradient, to save memory.")
@click.option(
    "--max-memory",
    type=float,
    metavar="GB",
    callback=options.at_least(0),
    help="Skip lengths at which a step without the patch needs more.  [default: what is free]",
)
@click.option(
    "--max-seconds",
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    callback=options.at_least(0),
    help="A length that has taken so long takes no further steps; 0: no limit.",
)
@options.repetitions(5, "Steps of each length and arm; one more to warm up is not counted.")
@options.seed("Of the random tokens and the adapters.")
@options.blas
@options.outputs
@options.plot("Draw step time and memory against the length into this .png or .svg file.")
def command(
    model: str | None,
    revision: str | None,
    seq_len: list[int],
    batch_size: int,
    num_layers: int | None,
    rank: int,
    grad_checkpoint: bool,
    max_memory: float | None,
    max_seconds: float,
    repetitions: int,
    seed: int,
    outputs: Outputs,
    plot_file: Path | None,
) -> None:
    """Step time and memory of LoRA fine-tuning, patch off against patch on.

    \b
    step           median time of a training step (20th–80th percentile):
                   forward, gradient and Adam's update, compiled
    tokens/s       tokens of a step over that median
    peak memory    the most that a step needs on top of the model, the
                   adapters and Adam's state
    loss           before the last step
    steps          that count, of each arm. A length that reaches
                   --max-seconds takes fewer than --repetitions. If its
                   warm-up does, the warm-up counts.
    max |Δ|        largest difference of the two losses at any step
    on/off         ratio of the two above; ~ behind it: the steps overlap,
                   and no difference is claimed
    flash:         what ran with the patch on: calls of each kernel, and
                   fallbacks, which are calls left to MLX, with the reason

    The step is that of mlx_lm.lora, with its learning rate and scale. Both arms begin with the same adapters, take
    turns in going first and learn from the same random tokens. Time and memory are those of any text. The loss says
    nothing about the model. Without the patch, attention needs memory for the square of the length. A length that
    does not fit is skipped, and named. Ctrl-C ends the run and reports the finished steps.
    """
    described_machine = machine.describe()
    loaded = models.load(model, revision)
    described_model = loaded.describe()  # before it gets adapters
    recipe = Recipe(batch_size, _layers(num_layers, loaded), rank, grad_checkpoint)
    for length in seq_len:
        loaded.require_positions(length, f"--seq-len {length}")
    machine.say_what_bounds(described_machine)

    pairs: list[Pair] = []
    skipped: dict[int, str] = {}  # length -> why
    stopped: BaseException | None = None
    try:
        with output.progress() as progress, training.trainable(loaded.model, recipe, seed):
            bar = progress.add_task("steps, off and on", total=len(seq_len) * repetitions)

            def lengths_that_fit() -> Iterator[int]:
                for number, length in enumerate(seq_len):
                    about = f"steps of {length:,} tokens, off and on"
                    progress.update(bar, description=about, completed=number * repetitions)
                    if reason := why_too_long(loaded, length, recipe, max_memory, pairs):
                        skipped[length] = reason
                    else:
                        yield length

            for pair in training.measured(loaded, lengths_that_fit(), recipe, repetitions, max_seconds, seed):
                pairs.append(pair)
                progress.advance(bar)
        if not pairs:
            raise EvalError("; ".join(skipped.values()))
    except (KeyboardInterrupt, EvalError) as error:  # what is measured by then is kept
        if not pairs:
            raise
        stopped = error

    result: dict[str, Any] = {
        "command": "finetune",
        "model": described_model,
        "settings": {
            "seq_len": seq_len,
            **asdict(recipe),
            "repetitions": repetitions,
            "tokens": "random",
            "learning_rate": training.defaults()["learning_rate"],
            "max_memory_gb": max_memory,
            "max_seconds": max_seconds,
            "seed": seed,
            "memory": memory_method(),
        },
        "results": [summary(list(of_length)) for _, of_length in groupby(pairs, key=lambda pair: pair.seq_len)],
        "skipped": [{"seq_len": length, "reason": reason} for length, reason in skipped.items()],
        "flash": sum((pair.flash for pair in pairs), start=Flash()).describe(),
        "interrupted": stopped is not None,
        "machine": described_machine,
    }

    def draw() -> None:
        if plot_file:
            drawing.save(plot_file, subject(result), [(described_machine["device"], charts(Node(result)))])

    outputs.deliver(result, csv_rows(result["results"]), partial(render, result), draw)
    if isinstance(stopped, EvalError):
        raise stopped
    if stopped:
        sys.exit(130)


def _layers(asked: int | None, loaded: models.LoadedModel) -> int:
    """How many layers get adapters. Raises EvalError for more than there are, and for 0, which mlx-lm takes as all."""
    there = len(loaded.model.layers)
    if asked is None:
        return min(int(training.defaults()["num_layers"]), there)
    if asked == -1:
        return there
    if not 1 <= asked <= there:
        raise EvalError(f"--num-layers must be -1 or between 1 and the {there} of {loaded.name}, not {asked}")
    return asked


def why_too_long(
    loaded: models.LoadedModel, length: int, recipe: Recipe, max_memory: float | None, pairs: Sequence[Pair]
) -> str | None:
    """In words, if a step without the patch has no memory for that length."""
    limit = machine.free_memory() if max_memory is None else max_memory * 1e9
    needed = training.expected_memory(loaded, length, recipe, pairs)
    if needed <= limit:
        return None
    there = f"{limit / 1e9:,.2f} GB are free" if max_memory is None else f"--max-memory is {max_memory:g} GB"
    about = "about" if pairs else "at least"
    return f"{length:,} tokens: a step without the patch needs {about} {needed / 1e9:,.2f} GB, {there}"


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """One length in the result file."""
    tokens = pairs[0].tokens
    trials: list[dict[str, Any]] = [
        {"order": list(pair.order)}
        | {name: {**trial.describe(tokens), "loss": pair.losses[name]} for name, trial in pair.trials.items()}
        for pair in pairs
    ]
    arms: dict[str, dict[str, float]] = {}
    for name in ARMS:
        seconds = [trial[name]["seconds"] for trial in trials]
        arms[name] = {
            "seconds": statistics.median(seconds),
            "seconds_p20": output.percentile(seconds, 0.2),
            "seconds_p80": output.percentile(seconds, 0.8),
            "tokens_per_s": tokens / statistics.median(seconds),
            "peak_memory_mb": max(trial[name]["peak_memory_mb"] for trial in trials),
            "loss": trials[-1][name]["loss"],
        }
    off, on = arms["off"], arms["on"]
    return {
        "seq_len": pairs[0].seq_len,
        **arms,
        "time_ratio": on["seconds"] / off["seconds"],
        "memory_ratio": on["peak_memory_mb"] / off["peak_memory_mb"] if off["peak_memory_mb"] else None,
        "max_abs_dloss": float(np.max([abs(pair.losses["on"] - pair.losses["off"]) for pair in pairs])),
        "flash": sum((pair.flash for pair in pairs), start=Flash()).describe(),
        "trials": trials,
    }


def csv_rows(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each step of each arm, in the order they ran."""
    return [
        {"seq_len": result["seq_len"], "repetition": number, "arm": name, **trial[name]}
        for result in results
        for number, trial in enumerate(result["trials"])
        for name in trial["order"]
    ]


def subject(result: dict[str, Any]) -> str:
    """What is trained, and how."""
    model, settings = result["model"], result["settings"]
    checkpoints = ", gradient checkpoints" if settings["grad_checkpoint"] else ""
    return " · ".join(
        [
            models.title(model),
            f"LoRA of rank {settings['rank']} in {settings['num_layers']} layers{checkpoints}",
            f"batch size {settings['batch_size']}, random tokens",
        ]
    )


def render(result: dict[str, Any], table: Table = output.columns) -> str:
    """The result as a page of text."""
    rows: list[tuple[str, ...]] = [("tokens", "patch", "step", "tokens/s", "peak memory", "loss", "steps")]
    for of_length in result["results"]:
        rows += _rows(of_length)
    flash, device = Flash.of(result["flash"]), result["machine"]["device"]
    how, shown = "off and on taking turns", table(rows)
    lines = [f"{subject(result)} · {how} · {device}", "", shown, "", *claims.legend(shown), str(flash)]
    if not flash.calls:
        lines.append("Flash did not run in training: both arms are MLX's own attention.")
    lines += machine.what_bounds(result["machine"])
    lines += [f"Skipped {length['reason']}." for length in result["skipped"]]
    if result["interrupted"]:
        lines.append("Interrupted; the figures are of the steps that were finished.")
    return "\n".join(lines)


def _rows(of_length: dict[str, Any]) -> list[tuple[str, ...]]:
    """One for each arm, and one that compares them."""
    arms = [
        (
            "" if number else f"{of_length['seq_len']:,}",
            name,
            output.duration([trial[name]["seconds"] for trial in of_length["trials"]]),
            f"{of_length[name]['tokens_per_s']:,.0f}",
            f"{of_length[name]['peak_memory_mb']:,.1f} MB",
            output.plain(of_length[name]["loss"], 6),
            f"{len(of_length['trials'])}",
        )
        for number, name in enumerate(ARMS)
    ]
    ratios = (
        Ratio.of(
            claims.quotient(of_length["on"][key], of_length["off"][key]),
            *([trial[name][key] for trial in of_length["trials"]] for name in ARMS),
        )
        for key in ("seconds", "tokens_per_s", "peak_memory_mb")
    )
    return [*arms, ("", "on/off", *map(str, ratios), f"max |Δ| {of_length['max_abs_dloss']:.1e}", "")]
