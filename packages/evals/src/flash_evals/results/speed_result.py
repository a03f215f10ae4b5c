"""The records that `flash-eval speed` writes to its result file."""

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from flashattn_core.arguments import Precision
from msgspec import Meta, field

from flash_evals.results.arms import ARMS, Arm, ByArm, Measurement, Trial
from flash_evals.results.claims import Ratio, quotient
from flash_evals.results.provenance import Model, ModelResult
from flash_evals.results.record import Amount, Count, Record

Kind = Literal["prompt", "generation"]


class Settings(Record):
    prompt: list[Count]
    generate: list[Count]
    depth: list[Count]
    batch_size: list[Count]
    num_draft_tokens: Count | None
    repetitions: Count
    seed: Count
    prefill_step_size: Count
    memory: str
    precision: Precision = "float32"  # the patch's precision; files without this field were measured in float32
    kv_bits: Count | None = None  # of quantised KV caches
    kv_group_size: Count = 64
    quantized_kv_start: Count = 0


class Case(NamedTuple):
    kind: Kind
    tokens: int  # read or generated, for each sequence
    depth: int  # tokens already in the KV cache, for each sequence
    batch_size: int  # sequences at once

    def __str__(self) -> str:
        name = f"{'pp' if self.kind == 'prompt' else 'tg'}{self.tokens}"
        many = f" x{self.batch_size}" if self.batch_size > 1 else ""
        return f"{name}{many}" + (f" @ d{self.depth}" if self.depth else "")


class Speed(Measurement):
    """One arm's figures in one trial."""

    drafted: Count  # tokens that the draft model guessed
    accepted: Count


class Summary(Record):
    """One arm's figures in one test."""

    tokens_per_s: Amount  # mean
    tokens_per_s_sd: Amount | None
    tokens_per_s_median: Amount
    peak_memory_mb: Amount
    attention_share: Amount | None  # attention's share of the time, 0 to 1
    accepted_share: Amount | None  # accepted / drafted tokens, 0 to 1

    @classmethod
    def of(cls, trials: Sequence[Speed], attention_share: float | None) -> "Summary":
        speeds = [trial.tokens_per_s for trial in trials]
        drafted = sum(trial.drafted for trial in trials)
        return cls(
            tokens_per_s=statistics.mean(speeds),
            tokens_per_s_sd=statistics.stdev(speeds) if len(speeds) > 1 else None,
            tokens_per_s_median=statistics.median(speeds),
            peak_memory_mb=max(trial.peak_memory_mb for trial in trials),
            attention_share=attention_share,
            accepted_share=sum(trial.accepted for trial in trials) / drafted if drafted else None,
        )


class Test(ByArm[Summary | None]):
    test: str
    kind: Kind
    tokens: Count
    depth: Count
    batch_size: Count
    ratio: Amount | None  # median tokens/s of on / median tokens/s of off; None if an arm failed
    trials: list[Trial[Speed | None]]
    failed: dict[Arm, str] = field(default_factory=dict)  # the errors of arms that cannot do this test

    @classmethod
    def of(
        cls, case: Case, attention: ByArm[float | None], trials: list[Trial[Speed | None]], failed: dict[Arm, str]
    ) -> "Test":
        measured = {name: [speed for trial in trials if (speed := trial[name])] for name in ARMS}
        off, on = (Summary.of(measured[name], attention[name]) if measured[name] else None for name in ARMS)
        ratio = on.tokens_per_s_median / off.tokens_per_s_median if on and off else None
        return cls(test=str(case), **case._asdict(), off=off, on=on, ratio=ratio, trials=trials, failed=failed)

    @property
    def speed(self) -> Ratio:
        return Ratio(None, False) if self.failed else Ratio.of_arms(self.ratio, self.trials, "tokens_per_s")

    @property
    def memory(self) -> Ratio:
        if not self.off or not self.on:
            return Ratio(None, False)
        value = quotient(self.on.peak_memory_mb, self.off.peak_memory_mb)
        return Ratio.of_arms(value, self.trials, "peak_memory_mb")


class Result(ModelResult, kw_only=True, tag="speed"):
    draft_model: Model | None
    settings: Settings
    results: Annotated[list[Test], Meta(min_length=1)]
