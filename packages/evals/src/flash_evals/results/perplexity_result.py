"""The records that `flash-eval perplexity` writes to its result file."""

from collections.abc import Sequence
from typing import Literal

from flashattn_core.arguments import Precision

from flash_evals.results.arms import ARMS, Arm, Measurement
from flash_evals.results.claims import Ratio, quotient
from flash_evals.results.provenance import Dataset, Machine, Model, ModelResult
from flash_evals.results.record import Amount, Count, Record

Scoring = Literal["rolling", "half"]
Documents = Literal["joined", "separate"]

SAME_NLL = 1e-4  # nats; predictions are the same if |mean ΔNLL| is at most this and the top-1 tokens agree everywhere

Name = Literal["other", "off", "on"]  # a column's name; "other": a --compare file, which has the same arm as this run
NAMES: tuple[Name, ...] = ("other", *ARMS)


class Settings(Record, kw_only=True):
    """All settings on which the perplexity, the speed or the memory depends."""

    context: Count
    stride: Count | None
    scoring: Scoring
    documents: Documents
    bos: Literal["bos", "eos"] | None
    detokenised: bool
    top1_tie: Amount  # the value of scoring.TIE in this run
    arm: Arm | Literal["both"]
    batch_size: Count
    max_windows: Count | None
    memory: str
    precision: Precision = "float32"  # the patch's precision; files without this field were measured in float32
    kv_bits: Count | None = None  # of quantised KV caches
    kv_group_size: Count = 64

    @property
    def arms(self) -> tuple[Arm, ...]:
        return ARMS if self.arm == "both" else (self.arm,)

    def __str__(self) -> str:
        half, bos = self.scoring == "half", {None: "no BOS", "bos": "BOS", "eos": "EOS as BOS"}[self.bos]
        parts = [
            f"context {self.context}",
            "second half of each chunk scored, as llama-perplexity does" if half else f"stride {self.stride}",
            bos,
            "documents one by one" if self.documents == "separate" else "",
            "detokenised" if self.detokenised else "",
            f"KV cache of {self.kv_bits} bits" if self.kv_bits else "",
        ]
        return ", ".join(filter(None, parts))


class Reading(Record, kw_only=True, omit_defaults=True):
    """The time and memory that each arm took to read one batch of windows."""

    windows: Count
    tokens: Count  # read by one arm
    rank: Count
    order: tuple[Arm, ...]
    off: Measurement | None = None
    on: Measurement | None = None

    def __getitem__(self, name: Arm) -> Measurement:
        """Returns the measurement of an arm. Raises ValueError if there is none, which may happen in a broken file."""
        measurement = self.off if name == "off" else self.on
        if measurement is None:
            raise ValueError(f"a trial lacks the figures of patch {name}")
        return measurement


class Column(Record, kw_only=True):
    """One arm's figures for a text. Word and byte figures are None with --scoring half."""

    ppl: float | None  # null in JSON if not finite
    ppl_se: float | None
    word_ppl: float | None = None
    byte_ppl: float | None = None
    bits_per_byte: float | None = None
    tokens_per_s: Amount  # median of the batches
    peak_memory_mb: Amount


class Paired(Record):
    """Compares the second column with the first. With --compare, max_abs_dlogit and mean_kl are NaN (null in JSON)."""

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
    """The earlier run whose score file, given with --compare, fills one column."""

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
    """The number of ranks (processes), and their joint tokens/s, which is the sum of the ranks' medians."""

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
            found = ", ".join(self.columns) or "none"
            raise ValueError(f"expected one or two of the columns {', '.join(NAMES)}, not {found}")
        if (self.paired.of if self.paired else None) != (tuple(self.columns) if len(self.columns) == 2 else None):
            raise ValueError("expected `paired` of the two columns if the file has two, otherwise null")

    @property
    def columns(self) -> dict[Name, Column]:
        """The result's columns, in the order of the page."""
        return {name: column for name in NAMES if (column := getattr(self, name)) is not None}

    def trials_of(self, name: Name) -> Sequence[Measurement]:
        if self.compared and name == self.compared.column:
            return self.compared.trials
        return [trial[name] for trial in self.trials if name != "other"]

    def ratio(self, figure: Literal["tokens_per_s", "peak_memory_mb"]) -> Ratio:
        """The second column's figure divided by the first's. Unknown if off and on differ in more than the patch."""
        of_another = self.compared and self.compared.column != "other" and self.compared.differs_in
        if not self.paired or of_another:
            return Ratio(None, apart=False)
        first, second = self.paired.of
        value = quotient(*(getattr(self.columns[name], figure) for name in (second, first)))
        return Ratio.of(value, *([getattr(t, figure) for t in self.trials_of(name)] for name in (first, second)))
