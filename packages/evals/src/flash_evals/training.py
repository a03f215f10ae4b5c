"""The work of `finetune`: LoRA training steps as mlx-lm's own trainer takes them, with the patch off and on.

Each arm has its own adapters and its own optimizer, from the same start, and goes its own way from there: after the
first step a difference of the losses is one of the gradients too.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.utils import value_and_grad
from mlx.optimizers import Adam
from msgspec.structs import asdict

from flash_evals import machine
from flash_evals.errors import failing
from flash_evals.measure import ARMS, Arm, Flash, Measurement, Trial, arms, run
from flash_evals.models import LoadedModel
from flash_evals.record import Amount, Count, Record
from flash_evals.workload import ITEM_SIZE

Sequences = tuple[mx.array, mx.array]  # tokens (sequences, seq_len + 1), and of each sequence the range that is learned


class Recipe(Record):
    """What is trained, and how; the names are mlx-lm's."""

    batch_size: Count
    num_layers: Count  # that get adapters, counted from the last
    rank: Count
    grad_checkpoint: bool


class Settings(Recipe, kw_only=True):
    seq_len: list[Count]
    repetitions: Count
    tokens: Literal["random"] = "random"
    learning_rate: Amount
    max_memory_gb: Amount | None
    max_seconds: Amount
    seed: Count
    memory: str


class StepOfArm(Measurement):
    loss: float | None  # before the step; in JSON null where it is not finite


class Step(NamedTuple):
    """A trial of a length."""

    seq_len: int
    trial: Trial[StepOfArm]
    flash: Flash  # of the length's first step: with the warm-up


class Trainee:
    """What one arm has learned, and mlx-lm's step of it."""

    def __init__(self, model: Any, adapters: dict[str, Any]) -> None:
        from mlx_lm.tuner.trainer import default_loss

        self.model = model
        self.adapters = adapters
        optimizer = Adam(learning_rate=defaults()["learning_rate"])
        optimizer.init(adapters)  # mlx-lm leaves it to the first step, and compiles the second anew
        mx.eval(optimizer.state)
        self.state = [model.state, optimizer.state, mx.random.state]
        loss_and_gradient = value_and_grad(model, default_loss)

        # For this arm alone: a compiled step holds the attention that was there when it was traced.
        @partial(mx.compile, inputs=self.state, outputs=self.state)
        def compiled(tokens: mx.array, ranges: mx.array) -> tuple[mx.array, mx.array]:
            (loss, count), gradient = loss_and_gradient(model, tokens, ranges)
            optimizer.update(model, gradient)
            return loss, count

        self.compiled: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]] = compiled

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """For one step: before and after it the other arm's adapters may be there."""
        self.model.update(self.adapters)
        self.adapters = {}  # so that the step can give up the old ones' memory, as it can in mlx-lm
        yield
        self.adapters = self.model.trainable_parameters()

    def step(self, batch: Sequences) -> float:
        """The loss before the step."""
        loss, tokens = self.compiled(*batch)
        mx.eval(self.state, loss, tokens)
        return float(np.array(loss))


def defaults() -> dict[str, Any]:
    """mlx-lm's own: `learning_rate`, `num_layers`, `lora_parameters`."""
    from mlx_lm.lora import CONFIG_DEFAULTS

    return dict(CONFIG_DEFAULTS)


@contextmanager
def trainable(model: Any, recipe: Recipe, seed: int) -> Iterator[None]:
    """The model with adapters, and nothing else of it learns; with gradient checkpoints until the block ends."""
    from mlx_lm.tuner.trainer import grad_checkpoint
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    maybe_set_recommended_wired_limit()
    mx.random.seed(seed)
    model.freeze()
    linear_to_lora_layers(model, recipe.num_layers, {**defaults()["lora_parameters"], "rank": recipe.rank})
    mx.eval(model.parameters())
    model.train()
    layer = type(model.layers[0])
    call = layer.__call__
    if recipe.grad_checkpoint:
        grad_checkpoint(model.layers[0])  # type: ignore[no-untyped-call]  # changes the class
    try:
        yield
    finally:
        layer.__call__ = call


def steps(
    loaded: LoadedModel, settings: Settings, fits: Callable[[int, Step | None], bool]
) -> Generator[Step, None, None]:
    """Takes the `repetitions` of each length with both arms, after one that warms up and is not counted.

    A length that has taken `max_seconds`, unless that is 0, takes no further steps. If the warm-up has, it counts:
    what it does once is nothing beside a step so long. `fits` gets a length, and the first step of the longest that was
    taken. Every length begins with the same adapters, every step has new tokens. Raises EvalError if a step fails.
    """
    longest: Step | None = None
    random = np.random.default_rng(settings.seed)
    start = loaded.model.trainable_parameters()
    for seq_len in settings.seq_len:
        if not fits(seq_len, longest):
            continue
        trainees = {name: Trainee(loaded.model, start) for name in ARMS}
        # The warm-up counts here: the step is traced then and never again, and calls that fall back do it there.
        flash = Flash()
        spent = 0.0
        for repetition in range(-1, settings.repetitions):
            batch = _batch(random.integers(loaded.vocabulary, size=(settings.batch_size, seq_len + 1)))
            measured: dict[Arm, StepOfArm] = {}
            for name in arms(repetition):
                what = f"a training step of {seq_len:,} tokens fails with the patch {name}"
                with failing(what), trainees[name].in_the_model():
                    work = partial(trainees[name].step, batch)
                    loss, measurement = run(name, work, seq_len * settings.batch_size, flash)
                measured[name] = StepOfArm(**asdict(measurement), loss=loss)
                spent += measurement.seconds
            enough = 0 < settings.max_seconds <= spent
            if repetition >= 0 or enough:
                step = Step(seq_len, Trial(**measured, order=arms(repetition)), flash)
                longest = step if longest is None or seq_len > longest.seq_len else longest
                yield step
                flash = Flash()
            if enough:
                break


def _batch(tokens: np.ndarray) -> Sequences:
    """As mlx-lm makes one of sequences that need no padding, ready before the clock starts."""
    batch = mx.array(tokens.astype(np.int32)), mx.array([[0, tokens.shape[1]]] * len(tokens))
    mx.eval(batch)
    return batch


def least_memory(loaded: LoadedModel, seq_len: int, recipe: Recipe) -> int:
    """Bytes that the scores of MLX's own attention take in one step, without anything else.

    Each layer that learns keeps its softmax for the gradient, with checkpoints only the one at work does; that one
    has one more such array, and where MLX's thread lags behind two. cuDNN keeps none. Its gradient takes multiples of
    128 tokens; else the layer at work computes its scores for the gradient alone.
    """
    item_size = ITEM_SIZE[loaded.described.dtype.split(", ")[-1]]
    if machine.kind() == "gpu" and mx.cuda.is_available() and item_size == 2 and loaded.head_dim in range(8, 129, 8):
        arrays = 1 if seq_len % 128 else 0
    else:
        arrays = (1 if recipe.grad_checkpoint else recipe.num_layers) + 1
    return arrays * recipe.batch_size * loaded.heads * seq_len**2 * item_size


def expected_memory(loaded: LoadedModel, seq_len: int, recipe: Recipe, longest: Step | None) -> float:
    """Bytes of a step without the patch: the scores, and for each token as much as the longest sequence so far has
    needed for all else. Before there is one, the scores alone."""
    needed: float = least_memory(loaded, seq_len, recipe)
    if longest:
        all_else = longest.trial.off.peak_memory_mb * 1e6 - least_memory(loaded, longest.seq_len, recipe)
        needed += max(0, all_else) / longest.seq_len * seq_len
    return needed
