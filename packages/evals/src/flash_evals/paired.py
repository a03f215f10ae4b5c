"""The work of `perplexity`: both arms read the same windows, and their logits are compared batch by batch.

Of a batch only a few numbers per token are kept, so memory does not grow with the text by more than those.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from flash_evals import scoring
from flash_evals.measure import ARMS, Arm, Flash, Trial, arms, run
from flash_evals.scoring import Window

Model = Callable[[mx.array], mx.array]

ROWS_AT_ONCE = 64  # with 150,000 tokens in the vocabulary, about 0.3 GB of intermediate results


@dataclass(frozen=True)
class Batch:
    """What both arms made of the same windows: one trial for each arm, one number for each scored token."""

    windows: int
    tokens_read: int
    order: tuple[Arm, Arm]
    trials: dict[Arm, Trial]
    nll: dict[Arm, np.ndarray]
    kl: np.ndarray
    agrees: np.ndarray
    max_abs_dlogit: float
    flash: Flash


def measured(model: Model, ids: np.ndarray, plan: Sequence[Window], batch_size: int) -> Iterator[Batch]:
    """Reads the planned windows of the tokens `ids`, `batch_size` at a time, with the patch off and on.

    Its size changes no score: a shorter window is padded behind its end, where causal attention does not look.
    Each arm reads the first window once before, to warm up, which is not counted.
    """
    batches = [plan[first : first + batch_size] for first in range(0, len(plan), batch_size)]
    for name in ARMS:
        run(name, partial(_forward, model, _read(ids, plan[:1])), Flash())
    for number, batch in enumerate(batches):
        yield _measure(model, ids, batch, arms(number))


def _measure(model: Model, ids: np.ndarray, batch: Sequence[Window], order: tuple[Arm, Arm]) -> Batch:
    read, flash = _read(ids, batch), Flash()
    logits: dict[Arm, mx.array] = {}
    trials: dict[Arm, Trial] = {}
    for name in order:
        logits[name], trials[name] = run(name, partial(_forward, model, read), flash)
    rows = [_compare(logits["off"][row], logits["on"][row], ids, window) for row, window in enumerate(batch)]
    off, on, kl, agrees, dlogit = (np.concatenate(column) for column in zip(*rows, strict=True))
    tokens = sum(window.end - window.begin for window in batch)
    return Batch(len(batch), tokens, order, trials, {"off": off, "on": on}, kl, agrees, float(np.max(dlogit)), flash)


def _read(ids: np.ndarray, batch: Sequence[Window]) -> mx.array:
    """The tokens that the windows read, (windows, length of the longest), ready before the clock starts."""
    rows = np.zeros((len(batch), max(window.end - window.begin for window in batch)), ids.dtype)
    for row, window in zip(rows, batch, strict=True):
        row[: window.end - window.begin] = ids[window.begin : window.end]
    read = mx.array(rows)
    mx.eval(read)
    return read


def _forward(model: Model, read: mx.array) -> mx.array:
    logits = model(read)
    mx.eval(logits)
    return logits


def _compare(off: mx.array, on: mx.array, ids: np.ndarray, window: Window) -> tuple[np.ndarray, ...]:
    """For each token that the window scores: NLL off, NLL on, KL, whether top-1 agrees, max |Δlogit|.

    Some rows at a time, in float32 whatever the model's type: of a large vocabulary all would be too much.
    """
    scored = range(window.first_scored, window.end + 1)
    parts = []
    for first in range(scored.start, scored.stop, ROWS_AT_ONCE):
        stop = min(first + ROWS_AT_ONCE, scored.stop)
        rows = slice(first - window.begin - 1, stop - window.begin - 1)
        targets = mx.array(ids[first:stop])
        off_rows, on_rows = off[rows].astype(mx.float32), on[rows].astype(mx.float32)
        figures = (
            scoring.token_nll(off_rows, targets),
            scoring.token_nll(on_rows, targets),
            scoring.kl_divergence(off_rows, on_rows),
            scoring.top1_agrees(off_rows, on_rows),
            mx.max(mx.abs(on_rows - off_rows), axis=-1),
        )
        mx.eval(figures)
        parts.append([np.array(figure) for figure in figures])
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
