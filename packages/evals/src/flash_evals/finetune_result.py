"""What `flash-eval finetune` found: the records of its result file, the rows of --csv."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from msgspec.structs import asdict

from flash_evals import claims, output
from flash_evals.claims import Ratio
from flash_evals.measure import ARMS, Arm, ByArm, Flash, Measurement
from flash_evals.record import Amount, Count, Record
from flash_evals.result import ModelResult
from flash_evals.training import Recipe, Step


class Settings(Recipe, kw_only=True):
    seq_len: list[Count]
    repetitions: Count
    tokens: Literal["random"] = "random"
    learning_rate: Amount
    max_memory_gb: Amount | None
    max_seconds: Amount
    seed: Count
    memory: str


class StepOfArm(Measurement):
    loss: float | None  # before the step


class Trial(ByArm[StepOfArm]):
    order: tuple[Arm, Arm]


class Summary(Record):
    """Of one arm at one length."""

    seconds: Amount  # median
    seconds_p20: Amount
    seconds_p80: Amount
    tokens_per_s: Amount
    peak_memory_mb: Amount
    loss: float | None  # before the last step


class Length(ByArm[Summary]):
    seq_len: Count
    time_ratio: Amount
    memory_ratio: Amount | None
    max_abs_dloss: Amount | None
    flash: Flash
    trials: list[Trial]

    @property
    def time(self) -> Ratio:
        return Ratio.of_arms(self.time_ratio, self.trials, "seconds")

    @property
    def speed(self) -> Ratio:
        return Ratio.of_arms(claims.quotient(self.on.tokens_per_s, self.off.tokens_per_s), self.trials, "seconds")

    @property
    def memory(self) -> Ratio:
        return Ratio.of_arms(self.memory_ratio, self.trials, "peak_memory_mb")


class Skipped(Record):
    seq_len: Count
    reason: str


class Result(ModelResult, kw_only=True, tag="finetune"):
    settings: Settings
    results: Annotated[list[Length], Meta(min_length=1)]
    skipped: list[Skipped]

    @property
    def subject(self) -> str:
        """What is trained, and how."""
        settings = self.settings
        checkpoints = ", gradient checkpoints" if settings.grad_checkpoint else ""
        lora = f"LoRA of rank {settings.rank} in {settings.num_layers} layers{checkpoints}"
        return f"{self.model.title} · {lora} · batch size {settings.batch_size}, random tokens"


def lengths(steps: Iterable[Step]) -> list[Length]:
    return [_length(list(of_length)) for _, of_length in groupby(steps, key=lambda step: step.seq_len)]


def _length(steps: Sequence[Step]) -> Length:
    trials = []
    for step in steps:
        one, two = (StepOfArm.of(step.trials[name], step.tokens, loss=step.losses[name]) for name in ARMS)
        trials.append(Trial(order=step.order, off=one, on=two))
    off, on = (_summary([trial[name] for trial in trials], steps[0].tokens) for name in ARMS)
    return Length(
        seq_len=steps[0].seq_len,
        off=off,
        on=on,
        time_ratio=on.seconds / off.seconds,
        memory_ratio=claims.quotient(on.peak_memory_mb, off.peak_memory_mb),
        max_abs_dloss=float(np.max([abs(step.losses["on"] - step.losses["off"]) for step in steps])),
        flash=Flash.sum(step.flash for step in steps),
        trials=trials,
    )


def _summary(trials: Sequence[StepOfArm], tokens: int) -> Summary:
    seconds = [trial.seconds for trial in trials]
    return Summary(
        seconds=statistics.median(seconds),
        seconds_p20=output.percentile(seconds, 0.2),
        seconds_p80=output.percentile(seconds, 0.8),
        tokens_per_s=tokens / statistics.median(seconds),
        peak_memory_mb=max(trial.peak_memory_mb for trial in trials),
        loss=trials[-1].loss,
    )


def csv_rows(result: Result) -> list[dict[str, Any]]:
    """One row for each step of each arm, in the order they ran."""
    return [
        {"seq_len": length.seq_len, "repetition": number, "arm": name, **asdict(trial[name])}
        for length in result.results
        for number, trial in enumerate(length.trials)
        for name in trial.order
    ]
