"""Does the work of `flash-eval finetune`: LoRA training steps as in mlx-lm's trainer, with the patch off and on.

Each arm trains its own adapters with its own optimizer, from the same start. So after the first step, the arms' losses
may also differ because earlier gradients differed.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.utils import value_and_grad
from mlx.optimizers import Adam
from mlx_lm.lora import CONFIG_DEFAULTS
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import maybe_set_recommended_wired_limit
from msgspec.structs import asdict

from flash_evals.results.arms import ARMS, Arm, Flash, Trial
from flash_evals.results.finetune_result import Length, Settings, Skipped, Step
from flash_evals.results.workload import ITEM_SIZE
from flash_evals.work import machine
from flash_evals.work.measure import run, trial
from flash_evals.work.models import LoadedModel

DEFAULTS: dict[str, Any] = CONFIG_DEFAULTS  # mlx-lm's `learning_rate`, `num_layers`, `lora_parameters` …


def trainee(model: Any, adapters: dict[str, Any]) -> Callable[[mx.array, mx.array], float]:
    """Returns mlx-lm's training step, for one arm. The step takes a batch, and returns the loss before its update."""
    optimizer = Adam(learning_rate=DEFAULTS["learning_rate"])
    optimizer.init(adapters)  # otherwise the first step would do this, and MLX would compile the second step again
    mx.eval(optimizer.state)
    state = [model.state, optimizer.state, mx.random.state]
    loss_and_gradient = value_and_grad(model, default_loss)

    # Each arm has its own compiled step, because a compiled step keeps the attention with which it was traced.
    @partial(mx.compile, inputs=state, outputs=state)
    def compiled(tokens: mx.array, ranges: mx.array) -> tuple[mx.array, mx.array]:
        (loss, count), gradient = loss_and_gradient(model, tokens, ranges)
        optimizer.update(model, gradient)
        return loss, count

    def step(tokens: mx.array, ranges: mx.array) -> float:
        loss, count = compiled(tokens, ranges)
        mx.eval(state, loss, count)
        return float(np.array(loss))

    return step


@contextmanager
def trainable(model: Any, num_layers: int, rank: int, checkpoints: bool, seed: int) -> Iterator[None]:
    """Adds adapters to the model and freezes the rest. If `checkpoints`, gradient checkpoints are on in the block."""
    maybe_set_recommended_wired_limit()
    mx.random.seed(seed)
    model.freeze()
    linear_to_lora_layers(model, num_layers, {**DEFAULTS["lora_parameters"], "rank": rank})
    mx.eval(model.parameters())
    model.train()
    layer = type(model.layers[0])
    call = layer.__call__
    if checkpoints:
        grad_checkpoint(model.layers[0])  # type: ignore[no-untyped-call]  # changes the layer's class
    try:
        yield
    finally:
        layer.__call__ = call


def lengths(loaded: LoadedModel, settings: Settings, skipped: list[Skipped]) -> Generator[Length, None, None]:
    """Yields, after each repetition of a length, the length's results so far. Each arm first takes a warm-up step.

    Lengths that do not fit into memory go to `skipped`. A length ends early once its steps have taken `max_seconds`; 0
    means no limit. If the warm-up alone takes that long, the warm-up counts as a repetition, because compilation
    matters little in so long a step. Every length begins with the same adapters, and every step has new tokens. Raises
    EvalError if a step fails.
    """
    random = np.random.default_rng(settings.seed)
    start = loaded.model.trainable_parameters()
    rest: dict[int, float] = {}

    def step(name: Arm) -> Step:
        # At this point the model may still have the other arm's adapters.
        loaded.model.update(adapters.pop(name))  # pop(), so that the step can free their memory, as in mlx-lm
        loss, took = run(
            name, partial(trainees[name], *batch), seq_len * settings.batch_size, flash, settings.precision
        )
        adapters[name] = loaded.model.trainable_parameters()
        return Step(**asdict(took), loss=loss)

    for seq_len in settings.seq_len:
        if reason := too_long(loaded, seq_len, settings, rest):
            skipped.append(Skipped(seq_len, reason))
            continue
        adapters = dict.fromkeys(ARMS, start)
        trainees = {name: trainee(loaded.model, start) for name in ARMS}
        # The counts include the warm-up, because only the warm-up traces a step, and only traced calls can fall back.
        flash, spent = Flash(), 0.0
        trials: list[Trial[Step]] = []
        for repetition in range(-1, settings.repetitions):
            batch = make_batch(random.integers(loaded.vocabulary, size=(settings.batch_size, seq_len + 1)))
            both = trial(f"a training step of {seq_len:,} tokens", repetition, step)
            spent += both.off.seconds + both.on.seconds
            enough = 0 < settings.max_seconds <= spent
            if repetition >= 0 or enough:
                trials.append(both)
                yield Length.of(seq_len, settings.batch_size, [*trials], flash)
            if enough:
                break
        rest[seq_len] = trials[0].off.peak_memory_mb * 1e6 - least_memory(loaded, seq_len, settings)


def make_batch(tokens: np.ndarray) -> tuple[mx.array, mx.array]:
    """Makes a batch for mlx-lm's loss: the tokens, and for each sequence the range of tokens to learn (all of them)."""
    batch = mx.array(tokens.astype(np.int32)), mx.array([[0, tokens.shape[1]]] * len(tokens))
    mx.eval(batch)  # before the clock starts
    return batch


def too_long(loaded: LoadedModel, seq_len: int, settings: Settings, rest: dict[int, float]) -> str | None:
    """Returns the reason if a step of that length does not fit into memory without the patch, else None.

    `rest` maps each length so far to the bytes that a step without the patch took beyond least_memory(). The estimate
    for `seq_len` is least_memory() plus the bytes of the longest length in `rest`, in proportion to the length.
    """
    given = settings.max_memory_gb
    limit = machine.free_memory() if given is None else given * 1e9
    needed: float = least_memory(loaded, seq_len, settings)
    if rest:
        needed += max(0, rest[max(rest)]) / max(rest) * seq_len
    if needed <= limit:
        return None
    there = f"only {limit / 1e9:,.2f} GB are free" if given is None else f"--max-memory is {given:g} GB"
    about = "about" if rest else "at least"
    return f"{seq_len:,} tokens: a step without the patch needs {about} {needed / 1e9:,.2f} GB, {there}"


def least_memory(loaded: LoadedModel, seq_len: int, settings: Settings) -> int:
    """Bytes that MLX's own attention needs in one step for arrays of shape (batch, heads, seq_len, seq_len).

    Each layer with adapters keeps its softmax, one such array, for the gradient. With gradient checkpoints, only the
    running layer keeps its softmax. The running layer needs at least one more array, and two more if MLX's thread lags
    behind. cuDNN stores no such arrays, but it computes gradients only if the length is a multiple of 128. For other
    lengths, the running layer needs one array.
    """
    item_size = ITEM_SIZE[loaded.described.dtype.split(", ")[-1]]
    if machine.kind() == "gpu" and mx.cuda.is_available() and item_size == 2 and loaded.head_dim in range(8, 129, 8):
        arrays = 1 if seq_len % 128 else 0
    else:
        arrays = (1 if settings.grad_checkpoint else settings.num_layers) + 1
    return arrays * settings.batch_size * loaded.heads * seq_len**2 * item_size
