"""The arithmetic of perplexity: which window scores which token, what a token costs, and how two arms compare."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

# A logit ties with the largest logit `best` if the two differ by at most TIE * max(|best|, 1). TIE is eight times
# float32's epsilon.
TIE = 2.0**-20
# The most tied tokens that are kept for one position. The limit saves memory if a whole vocabulary ties.
TIES_KEPT = 16


class Window(NamedTuple):
    """The model reads the tokens `begin <= k < end`; the window scores the tokens `first_scored <= k <= end`.

    Reading a token predicts the next one, so the last token that is scored is not read.
    """

    begin: int
    end: int
    first_scored: int


def windows(lengths: Sequence[int], context: int, stride: int) -> list[Window]:
    """Makes windows of `context` tokens, `stride` apart. Each token of a stream but the first is scored once.

    `lengths` has the number of tokens of each stream. No window extends over two streams. A stream's first window
    scores up to `context` tokens. Each later window scores the next `stride` tokens, or those that are left, and begins
    as early as `context` allows. So all windows are `context` tokens long, unless their stream is too short.
    lm-evaluation-harness's rolling windows are the same.

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
    """Cuts the tokens into chunks of `context` tokens. Only a chunk's second half is scored, as in llama-perplexity.

    The model's outputs at the positions context // 2 to context - 2 of a chunk are scored. Each predicts the token
    after it. Tokens at the end that do not fill a chunk are left out.

        n_tokens 10, context 4:     0 1 2 3 4 5 6 7 8 9     r: read, S: scored
                                    r r r S
                                            r r r S
    """
    starts = range(0, n_tokens - context + 1, context)
    return [Window(start, start + context - 1, start + context // 2 + 1) for start in starts]


def token_nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the cost of each target, -ln p in nats, as float32. logits: float32 (n, vocabulary); targets: (n,).

    mx.logsumexp is not used, because on a CPU it adds the numbers one by one in float32. With 150,000 numbers, every
    token's cost would be off by 2e-4 nats, always in the same direction. Here, numpy's exp errs only in the last place,
    and numpy adds the numbers in float64.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # logits that are not finite give NaN, which the page reports
        largest = logits.max(axis=-1)
        weights = np.exp(logits - largest[:, None])
        logsumexp = largest + np.log(weights.sum(axis=-1, dtype=np.float64))
        nll: np.ndarray = (logsumexp - logits[np.arange(len(targets)), targets]).astype(np.float32)
        return nll


def ranked_first(logits: mx.array) -> np.ndarray:
    """Returns for each row the token with the largest logit and up to TIES_KEPT tokens that tie, padded with -1."""
    best = mx.max(logits, axis=-1, keepdims=True)
    ties = best - logits <= TIE * mx.maximum(mx.abs(best), 1)
    row, token = np.divmod(np.flatnonzero(np.array(ties)), logits.shape[-1])
    place = 1 + np.arange(len(row)) - np.searchsorted(row, row)
    found = np.full((len(logits), 1 + TIES_KEPT), -1, np.int32)
    found[:, 0] = np.array(mx.argmax(logits, axis=-1))
    found[row[place <= TIES_KEPT], place[place <= TIES_KEPT]] = token[place <= TIES_KEPT]
    return found


def top1_agrees(off: np.ndarray, on: np.ndarray) -> np.ndarray:
    """For each row of ranked_first(): whether the first token of `on` is first, or tied for first, in `off`."""
    agrees: np.ndarray = (on[:, :1] == off).any(axis=-1) & (on[:, 0] >= 0)
    return agrees


def kl_divergence(off: mx.array, on: mx.array) -> mx.array:
    """KL(off || on) in nats of each row, for float32 logits (n, vocabulary).

    Let p be softmax(off), q softmax(on), and e = on - off - mean, where mean is Σ p·(on - off). If off and on agree to
    six digits, the usual sum of p·(ln p - ln q) is all rounding error, because its large terms cancel. The code uses
    ln(1 + Σ p·(exp(e) - 1 - e)), which is equal and has no negative terms. For small e, exp(e) - 1 - e is computed as a
    series, because the subtraction would lose digits.
    """
    log_p = off - mx.logsumexp(off, axis=-1, keepdims=True)
    p = mx.exp(log_p)
    e = on - off
    e = e - mx.sum(p * e, axis=-1, keepdims=True)
    series = e * e * (1 / 2 + e * (1 / 6 + e * (1 / 24 + e / 120)))  # if |e| <= 0.05, the next term is < 2e-8 of this
    excess = mx.sum(p * mx.where(mx.abs(e) <= 0.05, series, mx.exp(e) - 1 - e), axis=-1)
    return mx.where(excess < 1, mx.log1p(excess), mx.logsumexp(log_p + e, axis=-1))


def mean(values: np.ndarray) -> tuple[float, float]:
    """Returns the mean and its standard error, in float64. The error assumes that the values are independent.

    The costs of neighbouring tokens depend on each other, so a perplexity's true error is larger.
    """
    values = values.astype(np.float64)
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def exp(x: float) -> float:
    """Returns exp(x), or infinity if float64 overflows. A long, unknown word may cost more than 709 nats."""
    return math.exp(x) if not x > 709 else math.inf
