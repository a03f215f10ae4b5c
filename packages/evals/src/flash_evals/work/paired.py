"""Does the work of `flash-eval perplexity`. Both arms read the same windows, and each batch's logits are compared.

Only a few numbers per token are kept, so memory grows little with the text.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np
from flashattn_core.arguments import Precision

from flash_evals.results.arms import ARMS, Arm, Flash, Measurement
from flash_evals.results.errors import failing
from flash_evals.results.perplexity_result import Reading
from flash_evals.results.record import Record
from flash_evals.work import scoring
from flash_evals.work.measure import arms, run
from flash_evals.work.ranks import Ranks
from flash_evals.work.scoring import Window

Forward = Callable[[mx.array], mx.array]  # a model, which maps tokens (sequences, length) to logits

WARM_UP_ON_CPU = 256  # tokens; few are enough, because a CPU kernel's first call compiles nothing
ROWS_AT_ONCE = 64  # rows of logits; for a vocabulary of 150,000, about 0.3 GB of intermediate results


# The scores of one token. For each arm, these are the token's cost (-ln p) and the tokens that tie for the first rank.
# `kl` and `dlogit` compare the logits of both arms, and are NaN if only one arm ran.
OF_ARM = [("nll", "<f4"), ("first", "<i4", (1 + scoring.TIES_KEPT,))]
SCORED = np.dtype([("off", OF_ARM), ("on", OF_ARM), ("kl", "<f4"), ("dlogit", "<f4")])


class Batch(Record):
    """The scores and measurements of one batch of windows: a line of the score file."""

    trial: Reading
    flash: Flash
    scores: np.ndarray  # of dtype SCORED


def batches(
    forward: Forward,
    ids: np.ndarray,
    plan: Sequence[Window],
    batch_size: int,
    which: Sequence[Arm],
    ranks: Ranks,
    precision: Precision = "input",
) -> Generator[Batch, None, None]:
    """Reads the planned windows of the tokens `ids`, `batch_size` at a time, with the patch off, on, or both.

    The batch size does not change scores, because shorter windows are padded after their end, and causal attention
    hides the padding. Before the first batch, each arm warms up on the first window (on a CPU, its beginning).
    No figure counts this warm-up. Ranks (processes) take batches in turns. Each rank gets all results, in the order of
    the plan.
    """
    planned = [plan[first : first + batch_size] for first in range(0, len(plan), batch_size)]
    work = partial(_measure, forward, ids, rank=ranks.rank, precision=precision)
    if planned:
        first = plan[0]
        if mx.default_device() == mx.cpu:
            end = min(first.end, first.begin + WARM_UP_ON_CPU)
            first = Window(first.begin, end, min(first.first_scored, end))
        work([first], order=which)
    for number, begin in enumerate(range(0, len(planned), ranks.size)):
        order = [name for name in arms(number) if name in which]
        yield from ranks.each(partial(work, order=order), planned[begin : begin + ranks.size], Batch)


def _measure(
    forward: Forward,
    ids: np.ndarray,
    windows: Sequence[Window],
    *,
    order: Sequence[Arm],
    rank: int,
    precision: Precision,
) -> Batch:
    rows = np.zeros((len(windows), max(window.end - window.begin for window in windows)), ids.dtype)
    for row, window in zip(rows, windows, strict=True):
        row[: window.end - window.begin] = ids[window.begin : window.end]
    read = mx.array(rows)
    mx.eval(read)  # before the clock starts

    def work() -> mx.array:
        logits = forward(read)
        mx.eval(logits)
        return logits

    tokens, flash = sum(window.end - window.begin for window in windows), Flash()
    logits: dict[Arm, mx.array] = {}
    took: dict[Arm, Measurement] = {}
    for name in order:
        cure = " (--arm on runs the patch alone)" if name == "off" else ""
        with failing(f"a batch fails with the patch {name}{cure}"):
            logits[name], took[name] = run(name, work, tokens, flash, precision)
    scores = [
        _scores({name: logits[name][number, rows] for name in order}, ids[scored])
        for number, window in enumerate(windows)
        for scored, rows in _some_rows(window)
    ]
    trial = Reading(windows=len(windows), tokens=tokens, rank=rank, order=tuple(order), **took)
    return Batch(trial, flash, np.concatenate(scores))


def _some_rows(window: Window) -> Iterator[tuple[slice, slice]]:
    """Yields pairs: a slice of the tokens that the window scores, and the slice of logits that predicts these tokens.

    A slice has at most ROWS_AT_ONCE tokens, because float32 logits of a whole window would take too much memory.
    """
    for first in range(window.first_scored, window.end + 1, ROWS_AT_ONCE):
        stop = min(first + ROWS_AT_ONCE, window.end + 1)
        yield slice(first, stop), slice(first - window.begin - 1, stop - window.begin - 1)


def _scores(logits: dict[Arm, mx.array], targets: np.ndarray) -> np.ndarray:
    """Scores the tokens `targets`. `logits` has an array (tokens, vocabulary) for each arm. Returns dtype SCORED."""
    logits = {name: of_arm.astype(mx.float32) for name, of_arm in logits.items()}
    found = np.zeros(len(targets), SCORED)
    found["kl"] = found["dlogit"] = np.nan
    for name, of_arm in logits.items():
        found[name]["nll"] = scoring.token_nll(np.array(of_arm), targets)
        found[name]["first"] = scoring.ranked_first(of_arm)
        found[name]["first"][np.isnan(found[name]["nll"])] = -1  # NaN if some logits are not finite
    if len(logits) == len(ARMS):
        found["kl"] = np.array(scoring.kl_divergence(logits["off"], logits["on"]))
        found["dlogit"] = np.array(mx.max(mx.abs(logits["on"] - logits["off"]), axis=-1))
    return found
