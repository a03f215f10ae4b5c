"""What `flash-eval perplexity` found: the records of its result file, made of batches and of a file to compare with."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any, Literal

import numpy as np
from msgspec.structs import asdict

from flash_evals import plan, scoring
from flash_evals.claims import Ratio, quotient
from flash_evals.data import Dataset
from flash_evals.machine import Machine
from flash_evals.measure import ARMS, Arm, Flash, Measurement
from flash_evals.models import Model
from flash_evals.paired import Batch, Reading, Scores, top1_agrees
from flash_evals.plan import Size
from flash_evals.record import Amount, Count, Record
from flash_evals.result import ModelResult
from flash_evals.score_file import Header, Kept, differences, windows_in

SAME_NLL = 1e-4  # nats; a mean ΔNLL within this, and top-1 agreement everywhere, is called "same predictions"

Name = Literal["other", "off", "on"]  # of a column: an arm, or the same arm of another run
NAMES: tuple[Name, ...] = ("other", *ARMS)


class Settings(plan.Settings, kw_only=True):
    arm: Arm | Literal["both"]
    batch_size: Count
    max_windows: Count | None
    memory: str


class Column(scoring.Perplexity, kw_only=True):
    tokens_per_s: Amount  # median of the batches
    peak_memory_mb: Amount

    @classmethod
    def of(cls, scores: Scores, trials: Sequence[Measurement], size: Size) -> "Column":
        return cls(
            **asdict(scoring.perplexity(scores.nll, *size)),
            tokens_per_s=median(trial.tokens_per_s for trial in trials),
            peak_memory_mb=max(trial.peak_memory_mb for trial in trials),
        )


class Paired(Record):
    """The second column against the first. What takes the logits of both is None if only one arm ran; in JSON null is
    also what is not finite.
    """

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
            raise ValueError("expected `paired` of two arms, and of these")

    @property
    def columns(self) -> dict[Name, Column]:
        """In the order in which they are shown."""
        found: dict[Name, Column | None] = {"other": self.other, "off": self.off, "on": self.on}
        return {name: column for name, column in found.items() if column is not None}

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


def measured(batches: Sequence[Batch], size: Size, other: Kept | None, header: Header) -> dict[str, Any]:
    """The measured fields of a result; the scored tokens of these batches make up text of that size."""
    trials = [batch.trial for batch in batches]
    scores: dict[Name, Scores] = {arm: Scores.join([batch.scores[arm] for batch in batches]) for arm in header.arms}
    took: dict[Name, list[Measurement]] = {arm: [trial[arm] for trial in trials] for arm in header.arms}
    flash, compared = Flash.sum(batch.flash for batch in batches), None
    tokens = len(scores[header.arms[0]].nll)
    if other:
        ends = list(accumulate(batch.trial.windows for batch in other.batches))
        # Those that so many windows take: a file may hold more than were read here.
        first = other.batches[: bisect_left(ends, windows_in(batches)) + 1]
        compared = _compared(other, first, header)
        column = compared.column
        scores[column] = Scores.join([batch.scores[compared.arm] for batch in first]).first(tokens)
        took[column] = compared.trials
        if column == "on":
            flash = Flash.sum(batch.flash for batch in first)
    order = [name for name in NAMES if name in scores]
    return {
        "tokens": tokens,
        "words": size.words,
        "bytes": size.bytes,
        **{str(name): Column.of(scores[name], took[name], size) for name in order},
        "paired": _paired(order, scores, batches) if len(order) > 1 else None,
        "compared": compared,
        "flash": flash,
        "trials": trials,
    }


def _compared(other: Kept, batches: Sequence[Batch], header: Header) -> Compared:
    [live] = header.arms
    held = other.header.arms
    arm = next((name for name in held if name != live), held[0])
    return Compared(
        file=str(other.path),
        arm=arm,
        column="other" if arm == live else arm,
        differs_in=differences(other.header.of_the_conditions(), header.of_the_conditions()),
        model=other.header.model,
        batch_size=other.header.batch_size,
        ranks=other.header.ranks,
        machine=other.header.machine,
        trials=[batch.trial[arm] for batch in batches],
    )


def _paired(order: Sequence[Name], scores: dict[Name, Scores], batches: Sequence[Batch]) -> Paired:
    first, second = (scores[name] for name in order)
    delta = scoring.mean(second.nll - first.nll)
    both = [(batch.kl, batch.max_abs_dlogit) for batch in batches if batch.kl is not None]
    return Paired(
        of=(order[0], order[1]),
        delta_nll=delta.value,
        delta_nll_se=delta.se,
        max_abs_dlogit=float(np.max([dlogit for _, dlogit in both])) if both else None,
        mean_kl=scoring.mean(np.concatenate([kl for kl, _ in both])).value if both else None,
        top1_agreement=float(top1_agrees(first, second).mean()),
    )


def together(trials: Sequence[Reading], ranks: int) -> Together:
    speeds: dict[Arm, dict[int, list[float]]] = {}
    for trial in trials:
        for name in trial.order:
            speeds.setdefault(name, {}).setdefault(trial.rank, []).append(trial[name].tokens_per_s)
    sums = {name: sum(map(median, of_rank.values())) for name, of_rank in speeds.items()}
    return Together(size=ranks, tokens_per_s=sums)


def csv_rows(result: Result) -> list[dict[str, Any]]:
    """One row for each arm's share of a batch, in the order they ran."""
    return [
        {
            "batch": number,
            "arm": name,
            "windows": trial.windows,
            "tokens": trial.tokens,
            "rank": trial.rank,
            **asdict(trial[name]),
        }
        for number, trial in enumerate(result.trials)
        for name in trial.order
    ]
