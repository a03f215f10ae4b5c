"""What `flash-eval speed` found: the records of its result file, the rows of --csv, the page of text."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from flash_evals import claims, output
from flash_evals.claims import Ratio
from flash_evals.generation import Case, Kind, Repetition, Speed
from flash_evals.measure import ARMS, ByArm, Trial
from flash_evals.models import Model
from flash_evals.output import Table
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


def render(result: Result, table: Table = output.columns) -> str:
    """The result as a page of text."""
    drafting = result.draft_model is not None
    accepted = ["accepted off", "on"] if drafting else []
    speed, memory = ["patch off t/s", "patch on t/s", "on/off"], ["peak memory off", "on", "on/off"]
    titles = ["test", *speed, *memory, "attention off", "on", *accepted]
    figures = table([titles, *(_row(test, drafting) for test in result.results)])
    notes = result.notes(figures, "The patch never ran: both columns are MLX's own attention.")
    lines = [_header(result), "", figures, "", *notes]
    if result.interrupted:
        lines.append("Interrupted; the figures are of the trials that were finished.")
    return "\n".join(lines)


def _header(result: Result) -> str:
    draft, settings = result.draft_model, result.settings
    parts = [
        result.model.title,
        *([f"{settings.num_draft_tokens} tokens at a time drafted by {draft.title}"] if draft else []),
        f"{settings.repetitions} repetitions, off and on taking turns",
        result.machine.device,
    ]
    return " · ".join(parts)


def _row(test: Test, drafting: bool) -> list[str]:
    both = test.off, test.on
    return [
        test.test,
        *(_rate(arm) for arm in both),
        str(test.speed),
        *(f"{arm.peak_memory_mb:,.1f} MB" for arm in both),
        str(test.memory),
        *(_percent(arm.attention_share) for arm in both),
        *(_percent(arm.accepted_share) for arm in both if drafting),
    ]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _rate(arm: Summary) -> str:
    rate, sd = arm.tokens_per_s, arm.tokens_per_s_sd
    digits = 0 if rate >= 100 else 1
    return f"{rate:,.{digits}f}" + (f" ± {sd:,.{digits}f}" if sd is not None else "")
