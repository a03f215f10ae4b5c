"""What `flash-eval perplexity` found: the records of its result file, made of batches and of a file to compare with."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any, Literal

import numpy as np
from msgspec.structs import asdict

from flash_evals import scoring
from flash_evals.claims import Ratio, quotient
from flash_evals.data import Dataset
from flash_evals.machine import Machine
from flash_evals.measure import ARMS, Arm, Flash, Measurement
from flash_evals.models import Model
from flash_evals.paired import Batch, Reading
from flash_evals.plan import Plan, Settings
from flash_evals.record import Amount, Count, Record
from flash_evals.result import ModelResult
from flash_evals.score_file import SCORED_ARE, Header, Kept, differences, windows_in

SAME_NLL = 1e-4  # nats; a mean ΔNLL within this, and top-1 agreement everywhere, is called "same predictions"

Name = Literal["other", "off", "on"]  # of a column: an arm, or the same arm of another run
NAMES: tuple[Name, ...] = ("other", *ARMS)


class Column(Record, kw_only=True):
    """What one arm says of a text. Word and byte figures are None where the tokens do not make up a text."""

    ppl: float | None  # in JSON null where it is not finite
    ppl_se: float | None
    word_ppl: float | None = None
    byte_ppl: float | None = None
    bits_per_byte: float | None = None
    tokens_per_s: Amount  # median of the batches
    peak_memory_mb: Amount

    @classmethod
    def of(cls, nll: np.ndarray, trials: Sequence[Measurement], words: int | None, n_bytes: int | None) -> "Column":
        """From the cost of each scored token, and the words and bytes of the text that they make up.

        The error of the token perplexity is that of the mean cost times the perplexity (the delta method).
        """
        average, error = scoring.mean(nll)
        ppl, total = scoring.exp(average), average * len(nll)
        speed, memory = median(trial.tokens_per_s for trial in trials), max(trial.peak_memory_mb for trial in trials)
        column = cls(ppl=ppl, ppl_se=ppl * error, tokens_per_s=speed, peak_memory_mb=memory)
        if n_bytes:
            column.word_ppl = scoring.exp(total / words) if words else math.inf  # the first tokens: white space only
            column.byte_ppl = scoring.exp(total / n_bytes)
            column.bits_per_byte = total / n_bytes / math.log(2)
        return column


class Paired(Record):
    """The second column against the first. In JSON null: what is not finite; and max_abs_dlogit, mean_kl of one arm."""

    of: tuple[Name, Name]
    delta_nll: float | None
    delta_nll_se: Amount | None
    max_abs_dlogit: Amount | None
    mean_kl: Amount | None
    top1_agreement: Amount

    @property
    def same(self) -> bool:
        return self.top1_agreement == 1 and self.delta_nll is not None and abs(self.delta_nll) <= SAME_NLL


class Compared(Record):
    """The column that is of a file."""

    file: str
    arm: Arm
    column: Name
    differs_in: list[str]
    model: Model
    batch_size: Count
    ranks: Count
    machine: Machine
    trials: list[Measurement]


class Together(Record):
    """How many ranks took part, and the tokens per second of all: the sum of their medians."""

    size: Count
    tokens_per_s: dict[Arm, Amount]


class Windows(Record):
    planned: Count
    finished: Count
    resumed: Count


class Result(ModelResult, kw_only=True, omit_defaults=True, tag="perplexity"):
    dataset: Dataset
    settings: Settings
    tokens: Count
    words: Count | None
    bytes: Count | None
    other: Column | None = None
    off: Column | None = None
    on: Column | None = None
    paired: Paired | None
    compared: Compared | None
    trials: list[Reading]
    ranks: Together
    windows: Windows

    def __post_init__(self) -> None:
        if not 1 <= len(self.columns) <= 2:
            raise ValueError(f"expected the arms off and on, or one of them, not {', '.join(self.columns) or 'none'}")
        if (self.paired.of if self.paired else None) != (tuple(self.columns) if len(self.columns) == 2 else None):
            raise ValueError("expected `paired` if the file has two arms, and of these two")

    @property
    def columns(self) -> dict[Name, Column]:
        """In the order in which they are shown."""
        return {name: column for name in NAMES if (column := getattr(self, name)) is not None}

    def trials_of(self, name: Name) -> Sequence[Measurement]:
        if self.compared and name == self.compared.column:
            return self.compared.trials
        return [trial[name] for trial in self.trials if name != "other"]

    def ratio(self, figure: Literal["tokens_per_s", "peak_memory_mb"]) -> Ratio:
        """Not known if there is nothing to compare, or if the patch is not all that off and on differ in."""
        of_another = self.compared and self.compared.column != "other" and self.compared.differs_in
        if not self.paired or of_another:
            return Ratio(None, apart=False)
        first, second = self.paired.of
        value = quotient(*(getattr(self.columns[name], figure) for name in (second, first)))
        return Ratio.of(value, *([getattr(t, figure) for t in self.trials_of(name)] for name in (first, second)))


def result(
    header: Header, planned: Plan, windows: int, earlier: Sequence[Batch], batches: Sequence[Batch], other: Kept | None
) -> Result:
    """Of the batches, those of an `earlier` run first, and of a file beside them; so many windows are planned."""
    arms, trials = header.settings.arms, [batch.trial for batch in batches]
    tokens = np.concatenate([batch.scores for batch in batches])
    scores: dict[Name, np.ndarray] = {arm: tokens[arm] for arm in arms}
    took: dict[Name, list[Measurement]] = {arm: [trial[arm] for trial in trials] for arm in arms}
    finished, flash, compared, paired = windows_in(batches), Flash.sum(batch.flash for batch in batches), None, None
    if other:
        ends = accumulate(batch.trial.windows for batch in other.batches)
        # Those that so many windows take: a file may hold more than were read here.
        first = other.batches[: bisect_left(list(ends), finished) + 1]
        compared = _compared(other, [batch.trial for batch in first], header)
        scores[compared.column] = np.concatenate([batch.scores[compared.arm] for batch in first])[: len(tokens)]
        took[compared.column] = compared.trials
        if compared.column == "on":
            flash = Flash.sum(batch.flash for batch in first)
    names = [name for name in NAMES if name in scores]
    if len(names) == 2:
        one, two = (scores[name] for name in names)
        paired = Paired(
            (names[0], names[1]),
            *scoring.mean(two["nll"] - one["nll"]),
            max_abs_dlogit=float(tokens["dlogit"].max()),
            mean_kl=scoring.mean(tokens["kl"])[0],
            top1_agreement=float(scoring.top1_agrees(one["first"], two["first"]).mean()),
        )
    new = trials[len(earlier) :]
    of_ranks = [[trial for trial in new if trial.rank == rank] for rank in {trial.rank for trial in new}]
    speeds = {arm: [median(trial[arm].tokens_per_s for trial in of_rank) for of_rank in of_ranks] for arm in arms}
    words, n_bytes = planned.size_up_to(planned.windows[finished - 1])
    return Result(
        model=header.model,
        dataset=header.dataset,
        settings=header.settings,
        tokens=len(tokens),
        words=words,
        bytes=n_bytes,
        **{str(name): Column.of(scores[name]["nll"], took[name], words, n_bytes) for name in names},
        paired=paired,
        compared=compared,
        flash=flash,
        trials=trials,
        ranks=Together(header.ranks, {arm: sum(of_arm) for arm, of_arm in speeds.items() if of_arm}),
        windows=Windows(windows, finished, windows_in(earlier)),
        interrupted=finished < windows,
        machine=header.machine,
    )


def _compared(other: Kept, trials: Sequence[Reading], header: Header) -> Compared:
    [live], theirs = header.settings.arms, other.header
    arm = next((name for name in theirs.settings.arms if name != live), live)
    return Compared(
        file=str(other.path),
        arm=arm,
        column="other" if arm == live else arm,
        differs_in=differences(theirs, header, lambda key: key not in (*SCORED_ARE, "arm", "max_windows")),
        model=theirs.model,
        batch_size=theirs.settings.batch_size,
        ranks=theirs.ranks,
        machine=theirs.machine,
        trials=[trial[arm] for trial in trials],
    )


def csv_rows(result: Result) -> list[dict[str, Any]]:
    """One row for each arm's share of a batch, in the order they ran."""
    return [
        {"batch": n, "arm": arm, "windows": of.windows, "tokens": of.tokens, "rank": of.rank, **asdict(of[arm])}
        for n, of in enumerate(result.trials)
        for arm in of.order
    ]
