"""The records that `flash-eval finetune` writes to its result file."""

from collections.abc import Sequence
from statistics import median
from typing import Annotated, Literal

import numpy as np
from flashattn_core.arguments import Precision
from msgspec import Meta

from flash_evals.results.arms import ARMS, ByArm, Flash, Measurement, Trial
from flash_evals.results.claims import Ratio, percentile, quotient
from flash_evals.results.provenance import ModelResult
from flash_evals.results.record import Amount, Count, Record


class Settings(Record, kw_only=True):
    batch_size: Count
    num_layers: Count  # layers with adapters, counted from the last
    rank: Count
    grad_checkpoint: bool
    seq_len: list[Count]
    repetitions: Count
    tokens: Literal["random"] = "random"
    learning_rate: Amount
    max_memory_gb: Amount | None
    max_seconds: Amount
    seed: Count
    memory: str
    precision: Precision = "float32"  # the patch's precision; files without this field were measured in float32


class Step(Measurement):
    loss: float | None  # before the step; null in JSON if not finite


class Summary(Record):
    """All steps of one arm at one length."""

    seconds: Amount  # median
    seconds_p20: Amount
    seconds_p80: Amount
    tokens_per_s: Amount
    peak_memory_mb: Amount
    loss: float | None  # before the last step

    @classmethod
    def of(cls, steps: Sequence[Step], tokens: int) -> "Summary":
        seconds = [step.seconds for step in steps]
        return cls(
            seconds=median(seconds),
            seconds_p20=percentile(seconds, 0.2),
            seconds_p80=percentile(seconds, 0.8),
            tokens_per_s=tokens / median(seconds),
            peak_memory_mb=max(step.peak_memory_mb for step in steps),
            loss=steps[-1].loss,
        )


class Length(ByArm[Summary]):
    seq_len: Count
    time_ratio: Amount
    memory_ratio: Amount | None
    max_abs_dloss: Amount | None
    flash: Flash
    trials: list[Trial[Step]]

    @classmethod
    def of(cls, seq_len: int, batch_size: int, trials: list[Trial[Step]], flash: Flash) -> "Length":
        off, on = (Summary.of([trial[name] for trial in trials], seq_len * batch_size) for name in ARMS)
        losses = np.array([[trial[name].loss for name in ARMS] for trial in trials], float)
        return cls(
            seq_len=seq_len,
            off=off,
            on=on,
            time_ratio=on.seconds / off.seconds,
            memory_ratio=quotient(on.peak_memory_mb, off.peak_memory_mb),
            max_abs_dloss=float(np.abs(losses[:, 1] - losses[:, 0]).max()),
            flash=Flash.sum([flash]),
            trials=trials,
        )

    @property
    def time(self) -> Ratio:
        return Ratio.of_arms(self.time_ratio, self.trials, "seconds")

    @property
    def speed(self) -> Ratio:
        return Ratio.of_arms(quotient(self.on.tokens_per_s, self.off.tokens_per_s), self.trials, "seconds")

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
        settings = self.settings
        checkpoints = ", gradient checkpoints" if settings.grad_checkpoint else ""
        lora = f"LoRA of rank {settings.rank} in {settings.num_layers} layers{checkpoints}"
        return f"{self.model.title} · {lora} · batch size {settings.batch_size}, random tokens"
