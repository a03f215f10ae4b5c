"""Windows score each token but the first once, as lm-evaluation-harness does. Statistics of the scores agree with
numpy in float64. The arms agree at a position if both rank the same token first, or if there is a tie for first.
"""

import math

import mlx.core as mx
import numpy as np
import pytest
from flash_evals.results.arms import Measurement
from flash_evals.work import scoring, summary
from flash_evals.work.paired import _scores
from flash_evals.work.scoring import windows
from hypothesis import given
from hypothesis import strategies as st

from tests.promises import promise

NAN, INF = float("nan"), float("inf")


def log_softmax(logits):
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def test_token_nll_of_a_large_vocabulary():
    """If 151,936 numbers were added one by one in float32, the sum would be off by 2e-4, always in one direction."""
    logits = (3 * np.random.default_rng(0).standard_normal((16, 151_936))).astype(np.float32)
    error = scoring.token_nll(logits, np.arange(16)) + log_softmax(logits)[np.arange(16), np.arange(16)]
    assert np.abs(error).max() < 2e-6
    assert abs(error.mean()) < 5e-7


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100])
def test_kl_is_exact_from_rounding_noise_to_nonsense(size):
    """Even a divergence of 1e-11 is computed exactly. The usual formula would give noise of 1e-8 in float32."""
    random = np.random.default_rng(0)
    off = (random.standard_normal((64, 500)) * 4).astype(np.float32)
    on = (off + random.standard_normal(off.shape) * size).astype(np.float32)
    kl = np.array(scoring.kl_divergence(mx.array(off), mx.array(on)))
    log_p, log_q = log_softmax(off), log_softmax(on)
    np.testing.assert_allclose(kl, (np.exp(log_p) * (log_p - log_q)).sum(axis=-1), rtol=1e-4)


@pytest.mark.parametrize(
    ("nll", "words", "expected"),
    [
        ([NAN, 1.0], 1, {"ppl": NAN, "word_ppl": NAN}),
        ([800.0, 800.0], 1, {"ppl": INF, "word_ppl": INF}),
        ([1.0, 2.0], 0, {"word_ppl": INF, "byte_ppl": math.exp(1.5)}),
        ([1.0], 1, {"ppl": math.e, "ppl_se": NAN}),
        # A plain float32 sum of a million tenths is off by 1 %.
        ([0.1] * 1_000_000, 1, {"ppl": math.exp(np.float32(0.1))}),
    ],
)
def test_what_is_not_finite_and_what_is_long(nll, words, expected):
    column = summary.column(np.array(nll, np.float32), [Measurement(1.0, 1.0, 1.0)], words, 2)
    for figure, value in expected.items():
        assert getattr(column, figure) == pytest.approx(value, rel=1e-12, nan_ok=True)


# The logits of both arms at one position, and whether the arms agree there.
AGREEMENT = [
    ([1.0, 2.0, 0.0], [1.1, 1.9, 0.0], True),
    ([1.0, 2.0, 0.0], [2.1, 1.9, 0.0], False),
    ([16.0, 16.0, 0.0], [16.0, 16.1, 0.0], True),  # a tie may be broken either way
    ([16.0, 16.00001, 0.0], [16.1, 16.0, 0.0], True),  # 5 units in the last place apart: a tie
    ([16.0, 16.0001, 0.0], [16.1, 16.0, 0.0], False),  # 52 units apart: no tie
    ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], True),
    ([1e-9, 0.0, -1.0], [0.0, 1e-9, -1.0], True),
    ([NAN, 1.0, 0.0], [0.0, 1.0, 0.0], False),
    ([0.0, 1.0, 0.0], [NAN, 1.0, 0.0], False),
    ([1.0, NAN, 0.0], [1.0, NAN, 0.0], False),
    ([1.0, INF, 0.0], [1.0, 0.0, 0.0], False),
    ([1.0, 0.0, -INF], [1.0, 0.0, -INF], True),  # -INF: a token that the model must not choose
]


@pytest.mark.parametrize("rows", [1, len(AGREEMENT)])
def test_agreement(rows):
    """The number of tokens that are compared at once does not matter."""
    off, on, expected = zip(*AGREEMENT, strict=True)
    found = []
    for first in range(0, len(AGREEMENT), rows):
        both = {"off": mx.array(off[first : first + rows]), "on": mx.array(on[first : first + rows])}
        scores = _scores(both, np.zeros(rows, np.int32))
        found += scoring.top1_agrees(scores["off"]["first"], scores["on"]["first"]).tolist()
    assert found == list(expected)


def test_few_ties_are_kept():
    """If all tokens of the vocabulary tie, only 16 of them are kept, because more would fill the memory."""
    assert scoring.ranked_first(mx.zeros((2, 1000))).tolist() == [[0, *range(16)]] * 2


@promise("each token is scored once, with its longest context")
@given(st.lists(st.integers(0, 100), max_size=4), st.integers(1, 40), st.data())
def test_each_token_but_the_first_is_scored_once_as_lm_evaluation_harness_does(lengths, context, data):
    """Each text is scored alone. Its first token is a prefix, which is read and not predicted.

    The first window predicts `context` tokens. Each later window predicts the next `context - context_len + 1` tokens,
    and reads the `context` tokens before its last token. A text's last window may predict fewer tokens.
    """
    context_len = data.draw(st.integers(1, context))
    expected, start = [], 0
    for length in lengths:
        predicted = 0
        while predicted < length - 1:
            upto = min(predicted + (context - context_len + 1 if predicted else context), length - 1)
            expected.append((start + max(0, upto - context), start + upto, start + predicted + 1))
            predicted = upto
        start += length
    assert windows(lengths, context, context - context_len + 1) == expected
