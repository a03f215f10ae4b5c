"""Records of the model, text and machine that figures depend on, and the record that a model's results begin with."""

from pathlib import Path

from mlxlm_flash_patch.blas import REFERENCE

from flash_evals.results.arms import Flash
from flash_evals.results.record import Count, Record


def _count(n: float) -> str:
    """1.3 M, 494 M, 7.6 B."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if n >= size:
            return f"{n / size:.{0 if n >= 100 * size else 1}f}{unit}"
    return f"{n:.0f}"


class Model(Record):
    """A model as result files describe it."""

    name: str
    source: str  # the folder or hub id that was asked for
    revision: str | None  # the hub's commit
    adapter_path: str | None  # the folder that was asked for
    adapter_type: str | None  # mlx-lm's fine_tune_type: lora, dora or full
    type: str  # mlx-lm's name of the architecture
    parameters: Count  # without adapters; a quantised weight counts as many as it stands for
    dtype: str
    max_positions: int | None  # the longest sequence that the model was made for, in tokens; None if it does not say

    @property
    def title(self) -> str:
        """As the pages name it: `Qwen2 demo, 1.0 M parameters, float32`."""
        adapters = f"{self.adapter_type} adapters {Path(self.adapter_path).name}" if self.adapter_path else None
        size = f"{_count(self.parameters)} parameters"
        return ", ".join(filter(None, (self.name, self.revision, adapters, size, self.dtype)))


class Part(Record):
    """A part of a dataset."""

    config: str | None = None  # as the hub names it
    split: str | None = None  # "test" if not given
    column: str | None = None  # with the text; "text" if not given
    # The hub's branch, tag or commit, "main" if not given; in a result the commit, or the Python whose text it is.
    revision: str | None = None


class Dataset(Part, kw_only=True):
    """A text as result files have it."""

    name: str  # as printed
    source: str  # what was asked for
    fingerprint: str  # two runs with the same one are of the same characters
    documents: Count
    separator: str
    words: Count
    bytes: Count


class Machine(Record):
    system: str
    processor: str
    cores: int | None
    device: str
    blas: str | None  # what multiplies MLX's matrices, where that is known
    python: str
    versions: dict[str, str]

    @property
    def bounds(self) -> list[str]:
        """The line about a BLAS that bounds the speed of models there, whatever attention does."""
        return [REFERENCE] if self.blas == "reference" else []


class ModelResult(Record, kw_only=True, tag_field="command"):
    """The fields that the results of perplexity, speed and finetune share."""

    model: Model
    flash: Flash
    interrupted: bool
    machine: Machine
