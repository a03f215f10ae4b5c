"""What the results of perplexity, speed and finetune share: a model, what flash did in it, and the machine."""

from flash_evals.machine import Machine
from flash_evals.measure import Flash
from flash_evals.models import Model
from flash_evals.record import Record


class ModelResult(Record, kw_only=True, tag_field="command"):
    model: Model
    flash: Flash
    interrupted: bool
    machine: Machine
