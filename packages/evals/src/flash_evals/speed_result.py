"""What `flash-eval speed` found: the records of its result file, the rows of --csv."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from flash_evals import claims
from flash_evals.claims import Ratio
from flash_evals.generation import Case, Kind, Repetition, Speed
from flash_evals.measure import ARMS, ByArm, Trial
from flash_evals.models import Model
from flash_evals.record import Amount, Count, Record
from flash_evals.result import ModelResult


class Settings(Record):
    prompt: list[Count]
    generate: list[Count]
    depth: list[Count]
    batch_size: list[Count]
    num_draft_tokens: Count | None
    repetitions: Count
    delay: Amount
    seed: Count
    prefill_step_size: Count
    memory: str


class Summary(Record):
    """Of one arm in one test."""

    tokens_per_s: Amount  # mean
    tokens_per_s_sd: Amount | None
    tokens_per_s_median: Amount
    peak_memory_mb: Amount
    attention_share: Amount | None  # of the time
    accepted_share: Amount | None  # of the tokens that a draft model guessed


class Test(ByArm[Summary]):
    test: str
    kind: Kind
    tokens: Count
    depth: Count
    batch_size: Count
    ratio: Amount  # of the medians of tokens/s
    trials: list[Trial[Speed]]

    @property
    def speed(self) -> Ratio:
        return Ratio.of_arms(self.ratio, self.trials, "tokens_per_s")

    @property
    def memory(self) -> Ratio:
        value = claims.quotient(self.on.peak_memory_mb, self.off.peak_memory_mb)
        return Ratio.of_arms(value, self.trials, "peak_memory_mb")


class Result(ModelResult, kw_only=True, tag="speed"):
    draft_model: Model | None
    settings: Settings
    results: Annotated[list[Test], Meta(min_length=1)]


def tests(repetitions: Iterable[Repetition]) -> list[Test]:
    return [_test(case, list(of_test)) for case, of_test in groupby(repetitions, key=lambda each: each.test)]


def _test(case: Case, repetitions: Sequence[Repetition]) -> Test:
    trials = [each.trial for each in repetitions]
    off, on = (_summary([trial[name] for trial in trials], repetitions[0].attention[name]) for name in ARMS)
    ratio = on.tokens_per_s_median / off.tokens_per_s_median
    return Test(test=str(case), **case._asdict(), off=off, on=on, ratio=ratio, trials=trials)


def _summary(trials: Sequence[Speed], attention_share: float | None) -> Summary:
    speeds = [trial.tokens_per_s for trial in trials]
    drafted = sum(trial.drafted for trial in trials)
    return Summary(
        tokens_per_s=statistics.mean(speeds),
        tokens_per_s_sd=statistics.stdev(speeds) if len(speeds) > 1 else None,
        tokens_per_s_median=statistics.median(speeds),
        peak_memory_mb=max(trial.peak_memory_mb for trial in trials),
        attention_share=attention_share,
        accepted_share=sum(trial.accepted for trial in trials) / drafted if drafted else None,
    )


def csv_rows(result: Result) -> list[dict[str, Any]]:
    """One row for each trial of each arm, in the order they ran; attention's share is the same in all of an arm."""
    return [
        {
            **{key: getattr(test, key) for key in ("test", *Case._fields)},
            "repetition": number,
            "arm": name,
            **asdict(trial[name]),
            "attention_share": test[name].attention_share,
        }
        for test in result.results
        for number, trial in enumerate(test.trials)
        for name in trial.order
    ]
