"""The arithmetic of perplexity: which window scores which token, what a token costs, how two arms compare.

Nothing here knows of models, files or the clock.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

# Two logits this close, relative to the larger one, are a tie: eight roundings of float32.
TIE = 2.0**-20
# Of a token, the one ranked first among them; a model that likes all its vocabulary the same would fill the memory.
TIES_KEPT = 16


class Window(NamedTuple):
    """The model reads the tokens `begin <= k < end`; the window scores the tokens `first_scored <= k <= end`.

    Reading k tokens predicts the k tokens that follow each of them, so the last one scored is not read.
    """

    begin: int
    end: int
    first_scored: int


def windows(lengths: Sequence[int], context: int, stride: int) -> list[Window]:
    """Windows of `context` tokens, `stride` apart, that score each token of a stream but its first exactly once.

    The streams have so many tokens each and lie one behind the other; no window reaches into another. The first window
    of a stream scores all it can; each later one the next `stride` tokens, or what is left of them, and it reaches back
    from the last of these as far as `context` allows. So all windows are `context` long, unless the stream is shorter
    than that. lm-evaluation-harness's rolling windows are the same ones.

        length 9, context 4, stride 2:       0 1 2 3 4 5 6 7 8     r: read, S: scored, B: both
                                             r B B B S
                                                 r r r B S
                                                     r r r B S
    """
    result: list[Window] = []
    start = 0
    for length in lengths:
        scored = 1
        while scored < length:
            end = min(scored + (context if scored == 1 else stride), length) - 1
            result.append(Window(start + max(0, end - context), start + end, start + scored))
            scored = end + 1
        start += length
    return result


def half_windows(n_tokens: int, context: int) -> list[Window]:
    """Chunks of `context` tokens that do not overlap; of each the second half is scored, as llama-perplexity does it.

    The model's outputs at the positions context // 2 to context - 2 of a chunk predict the tokens that follow them.
    Tokens at the end that fill no chunk are left out.

        n_tokens 10, context 4:     0 1 2 3 4 5 6 7 8 9     r: read, S: scored
                                    r r r S
                                            r r r S
    """
    starts = range(0, n_tokens - context + 1, context)
    return [Window(start, start + context - 1, start + context // 2 + 1) for start in starts]


def token_nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """What each target cost, -ln p, for float32 logits (n, vocabulary) and targets (n,); float32.

    Not by mx.logsumexp: on a CPU it adds one number after the other in float32, and of 150,000 that costs every token
    2e-4 nats in one direction. numpy's exp is good to its last place, and the sum is float64.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # logits that are no finite numbers: NaN, which the page names
        largest = logits.max(axis=-1)
        weights = np.exp(logits - largest[:, None])
        logsumexp = largest + np.log(weights.sum(axis=-1, dtype=np.float64))
        nll: np.ndarray = (logsumexp - logits[np.arange(len(targets)), targets]).astype(np.float32)
        return nll


def ranked_first(logits: mx.array) -> np.ndarray:
    """Of each row the token with the largest logit, and behind it the first of those that tie with it; else -1."""
    best = mx.max(logits, axis=-1, keepdims=True)
    ties = best - logits <= TIE * mx.maximum(mx.abs(best), 1)
    row, token = np.divmod(np.flatnonzero(np.array(ties)), logits.shape[-1])
    place = 1 + np.arange(len(row)) - np.searchsorted(row, row)
    found = np.full((len(logits), 1 + TIES_KEPT), -1, np.int32)
    found[:, 0] = np.array(mx.argmax(logits, axis=-1))
    found[row[place <= TIES_KEPT], place[place <= TIES_KEPT]] = token[place <= TIES_KEPT]
    return found


def top1_agrees(off: np.ndarray, on: np.ndarray) -> np.ndarray:
    """For each row of `ranked_first` whether what `on` ranks first is first for `off` too, or ties with it."""
    agrees: np.ndarray = (on[:, :1] == off).any(axis=-1) & (on[:, 0] >= 0)
    return agrees


def kl_divergence(off: mx.array, on: mx.array) -> mx.array:
    """KL(off || on) in nats of each row, for float32 logits (n, vocabulary).

    The usual sum of p·(ln p - ln q) drowns in rounding when the two agree to six digits: its terms are large
    and cancel. With e the difference of the logits, less its mean under p, the same quantity is
    ln(1 + Σ p·(exp(e) - 1 - e)), and no term is negative. For small e the bracket is summed as a series,
    because it cancels too.
    """
    log_p = off - mx.logsumexp(off, axis=-1, keepdims=True)
    p = mx.exp(log_p)
    e = on - off
    e = e - mx.sum(p * e, axis=-1, keepdims=True)
    series = e * e * (1 / 2 + e * (1 / 6 + e * (1 / 24 + e / 120)))  # |e| <= 0.05: the next term is 2e-8 of this
    excess = mx.sum(p * mx.where(mx.abs(e) <= 0.05, series, mx.exp(e) - 1 - e), axis=-1)
    return mx.where(excess < 1, mx.log1p(excess), mx.logsumexp(log_p + e, axis=-1))


def mean(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error, in float64, the values taken as independent.

    Tokens of one text are not: the true error of a perplexity as a statement about other text is larger.
    """
    values = values.astype(np.float64)
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def exp(x: float) -> float:
    """Infinite where float64 ends: a model that knows nothing of a long word."""
    return math.exp(x) if not x > 709 else math.inf
