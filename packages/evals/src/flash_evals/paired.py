"""The work of `perplexity`: the arms read the same windows, and what they make of them is compared batch by batch.

Of a batch only a few numbers per token are kept, so memory does not grow with the text by more than those.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from flash_evals import scoring
from flash_evals.measure import ARMS, Arm, Flash, Measurement, arms, run
from flash_evals.ranks import Ranks
from flash_evals.record import Count, Record
from flash_evals.scoring import Window

Forward = Callable[[mx.array], mx.array]  # of a model: tokens (sequences, length) to logits

ROWS_AT_ONCE = 64  # with 150,000 tokens in the vocabulary, about 0.3 GB of intermediate results
TIES_KEPT = 16  # of a token; a model that likes all its vocabulary the same would fill the memory with them


class Scores(Record):
    """What one arm makes of n scored tokens: enough to compare it with another that is not there."""

    nll: np.ndarray  # (n,) float32: -ln p of the token that came
    top1: np.ndarray  # (n,) int32: the token ranked first, -1 if there are logits that are no finite numbers
    ties: np.ndarray  # (ties, 2) int32: scored token, and a token that ties with the first there

    def __post_init__(self) -> None:
        """A file has no dtypes."""
        self.nll = self.nll.astype(np.float32, copy=False)
        self.top1 = self.top1.astype(np.int32, copy=False)
        self.ties = self.ties.astype(np.int32, copy=False).reshape(-1, 2)

    @classmethod
    def join(cls, parts: Sequence["Scores"]) -> "Scores":
        starts = np.cumsum([0, *(len(part.nll) for part in parts[:-1])])
        shifted = [part.ties + np.array([start, 0], np.int32) for part, start in zip(parts, starts, strict=True)]
        nll, top1 = (np.concatenate([getattr(part, name) for part in parts]) for name in ("nll", "top1"))
        return cls(nll, top1, np.concatenate(shifted).astype(np.int32))

    def first(self, tokens: int) -> "Scores":
        return Scores(self.nll[:tokens], self.top1[:tokens], self.ties[self.ties[:, 0] < tokens])


def top1_agrees(off: Scores, on: Scores) -> np.ndarray:
    """For each token whether what `on` ranks first is first for `off` too, or ties with it (scoring.TIE)."""
    agrees: np.ndarray = (on.top1 == off.top1) & (on.top1 >= 0)
    token, tied = off.ties.T
    agrees[token[on.top1[token] == tied]] = True
    return agrees


class Reading(Record, kw_only=True, omit_defaults=True):
    """A trial: what it took to read the windows of a batch."""

    windows: Count
    tokens: Count  # that were read
    rank: Count
    order: tuple[Arm, ...]
    off: Measurement | None = None
    on: Measurement | None = None

    def __getitem__(self, name: Arm) -> Measurement:
        """Of an arm that ran. Raises ValueError for another: a broken file may claim it."""
        measurement = self.off if name == "off" else self.on
        if measurement is None:
            raise ValueError(f"a trial has no arm {name}")
        return measurement


class Batch(Record, kw_only=True):
    """What the arms made of the same windows, and how it differs: a line of the file that keeps it."""

    trial: Reading
    scores: dict[Arm, Scores]
    kl: np.ndarray | None  # float32, for each scored token; None if one arm ran
    max_abs_dlogit: float | None
    flash: Flash

    def __post_init__(self) -> None:
        if self.kl is not None:
            self.kl = self.kl.astype(np.float32, copy=False)
            self.max_abs_dlogit = np.nan if self.max_abs_dlogit is None else self.max_abs_dlogit


def batches(
    forward: Forward, ids: np.ndarray, plan: Sequence[Window], batch_size: int, which: Collection[Arm], ranks: Ranks
) -> Generator[Batch, None, None]:
    """Reads the planned windows of the tokens `ids`, `batch_size` at a time, with the patch off, on, or both.

    Its size changes no score: a shorter window is padded behind its end, where causal attention does not look.
    Each arm reads the first window once before, to warm up, which is not counted. Ranks take batches in turns, and
    each of them is given all, in the order of the plan.
    """
    planned = [plan[first : first + batch_size] for first in range(0, len(plan), batch_size)]
    for name in which if plan else ():
        run(name, partial(_logits, forward, _read(ids, plan[:1])), _tokens(plan[:1]), Flash())
    for number, first in enumerate(range(0, len(planned), ranks.size)):
        order = tuple(name for name in arms(number) if name in which)
        work = partial(_measure, forward, ids, order=order, rank=ranks.rank)
        yield from ranks.each(work, planned[first : first + ranks.size])


def _measure(
    forward: Forward, ids: np.ndarray, windows: Sequence[Window], *, order: tuple[Arm, ...], rank: int
) -> Batch:
    work, tokens, flash = partial(_logits, forward, _read(ids, windows)), _tokens(windows), Flash()
    logits: dict[Arm, mx.array] = {}
    took: dict[Arm, Measurement] = {}
    for name in order:
        logits[name], took[name] = run(name, work, tokens, flash)
    scores = {
        name: Scores.join([_score(logits[name][row], ids, window) for row, window in enumerate(windows)])
        for name in order
    }
    kl, max_abs_dlogit = None, None
    if len(order) == len(ARMS):
        rows = [_compare(logits["off"][row], logits["on"][row], window) for row, window in enumerate(windows)]
        kl, dlogit = (np.concatenate(column) for column in zip(*rows, strict=True))
        max_abs_dlogit = float(np.max(dlogit))
    trial = Reading(windows=len(windows), tokens=tokens, rank=rank, order=order, **took)
    return Batch(trial=trial, scores=scores, kl=kl, max_abs_dlogit=max_abs_dlogit, flash=flash)


def _tokens(windows: Sequence[Window]) -> int:
    """That they read."""
    return sum(window.end - window.begin for window in windows)


def _read(ids: np.ndarray, windows: Sequence[Window]) -> mx.array:
    """The tokens that the windows read, (windows, length of the longest), ready before the clock starts."""
    rows = np.zeros((len(windows), max(window.end - window.begin for window in windows)), ids.dtype)
    for row, window in zip(rows, windows, strict=True):
        row[: window.end - window.begin] = ids[window.begin : window.end]
    read = mx.array(rows)
    mx.eval(read)
    return read


def _logits(forward: Forward, read: mx.array) -> mx.array:
    logits = forward(read)
    mx.eval(logits)
    return logits


def _score(logits: mx.array, ids: np.ndarray, window: Window) -> Scores:
    """Of the tokens that the window scores, for the logits (length, vocabulary) of the tokens it reads."""
    parts = []
    for scored, rows in _some_rows(window):
        some = logits[rows].astype(mx.float32)
        nll = scoring.token_nll(np.array(some), ids[scored])
        best = mx.max(some, axis=-1)
        top1 = mx.where(mx.isfinite(best) & ~mx.isnan(mx.array(nll)), mx.argmax(some, axis=-1).astype(mx.int32), -1)
        tied = best[:, None] - some <= scoring.TIE * mx.maximum(mx.abs(best), 1)[:, None]
        several = mx.sum(tied, axis=-1) > 1
        mx.eval(top1, tied, several)
        ties = [
            (row, token)
            for row in np.flatnonzero(np.array(several))
            for token in np.flatnonzero(np.array(tied[int(row)]))[:TIES_KEPT]
        ]
        parts.append(Scores(nll, np.array(top1), np.array(ties, np.int32).reshape(-1, 2)))
    return Scores.join(parts)


def _compare(off: mx.array, on: mx.array, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """For each token that the window scores: KL, max |Δlogit|."""
    parts = []
    for _, rows in _some_rows(window):
        off_rows, on_rows = off[rows].astype(mx.float32), on[rows].astype(mx.float32)
        figures = (scoring.kl_divergence(off_rows, on_rows), mx.max(mx.abs(on_rows - off_rows), axis=-1))
        mx.eval(figures)
        parts.append([np.array(figure) for figure in figures])
    kl, dlogit = (np.concatenate(column) for column in zip(*parts, strict=True))
    return kl, dlogit


def _some_rows(window: Window) -> Iterator[tuple[slice, slice]]:
    """The tokens that the window scores, some at a time, and the rows of its logits that predict them.

    They are looked at in float32 whatever the model's type: of a large vocabulary all would be too much.
    """
    for first in range(window.first_scored, window.end + 1, ROWS_AT_ONCE):
        stop = min(first + ROWS_AT_ONCE, window.end + 1)
        yield slice(first, stop), slice(first - window.begin - 1, stop - window.begin - 1)
