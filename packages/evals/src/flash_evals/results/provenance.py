"""Records of a run's model, text and machine, and ModelResult, the base class of results about models."""

from pathlib import Path

from mlxlm_flash_patch.blas import REFERENCE

from flash_evals.results.arms import Flash
from flash_evals.results.record import Count, Record


def _count(n: float) -> str:
    """Formats a number: 1.3 M, 494 M, 7.6 B."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if n >= size:
            return f"{n / size:.{0 if n >= 100 * size else 1}f}{unit}"
    return f"{n:.0f}"


class Model(Record):
    """A model as result files describe it."""

    name: str
    source: str  # the folder or hub id as the user gave it
    revision: str | None  # the hub's commit
    adapter_path: str | None  # the folder as the user gave it
    adapter_type: str | None  # mlx-lm's fine_tune_type: lora, dora or full
    type: str  # mlx-lm's name of the architecture
    parameters: Count  # adapters do not count; each quantised weight counts as one, however it is packed
    dtype: str
    max_positions: int | None  # the longest sequence in tokens; None if the model's config does not state it

    @property
    def title(self) -> str:
        """The model as pages show it: `Qwen2 demo, 1.0 M parameters, float32`."""
        adapters = f"{self.adapter_type} adapters {Path(self.adapter_path).name}" if self.adapter_path else None
        size = f"{_count(self.parameters)} parameters"
        return ", ".join(filter(None, (self.name, self.revision, adapters, size, self.dtype)))


class Part(Record):
    """A part of a dataset."""

    config: str | None = None  # as the hub names it
    split: str | None = None  # "test" if not given
    column: str | None = None  # the column with the text; "text" if not given
    # In an option, a branch, tag or commit (None: "main"). In a result, the commit or, for pydoc, Python's version.
    revision: str | None = None


class Dataset(Part, kw_only=True):
    """A text as result files describe it."""

    name: str  # as pages show it
    source: str  # as the user gave it
    fingerprint: str  # SHA-256 of the text
    documents: Count
    separator: str
    words: Count
    bytes: Count


class Machine(Record):
    system: str
    processor: str
    cores: int | None
    device: str
    blas: str | None  # the library that multiplies MLX's matrices, if known
    python: str
    versions: dict[str, str]

    @property
    def bounds(self) -> list[str]:
        """A warning if MLX uses the reference BLAS, which slows models down with any attention."""
        return [REFERENCE] if self.blas == "reference" else []


class ModelResult(Record, kw_only=True, tag_field="command"):
    """The fields that the results of perplexity, speed and finetune share."""

    model: Model
    flash: Flash
    interrupted: bool
    machine: Machine
