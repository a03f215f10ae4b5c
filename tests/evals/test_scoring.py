"""Which window scores which token: each but the first once, with the longest context it can have, and the windows of
others; the statistics of the scores, against float64 numpy; and which token an arm ranks first.
"""

import math
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import paired, scoring
from flash_evals.paired import Scores, top1_agrees
from flash_evals.scoring import Window, windows
from hypothesis import given
from hypothesis import strategies as st

NAN, INF = float("nan"), float("inf")


def log_softmax(logits):
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def test_token_nll_of_a_large_vocabulary():
    """A float32 sum of so many, one after the other, is off by 2e-4, always to the same side."""
    logits = (3 * np.random.default_rng(0).standard_normal((16, 151_936))).astype(np.float32)
    error = scoring.token_nll(logits, np.arange(16)) + log_softmax(logits)[np.arange(16), np.arange(16)]
    assert np.abs(error).max() < 2e-6
    assert abs(error.mean()) < 5e-7


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100])
def test_kl_is_exact_from_rounding_noise_to_nonsense(size):
    """Where the usual float32 sum gives 1e-8 of noise, the value itself is 1e-11 and must come out."""
    random = np.random.default_rng(0)
    off = (random.standard_normal((64, 500)) * 4).astype(np.float32)
    on = (off + random.standard_normal(off.shape) * size).astype(np.float32)
    kl = np.array(scoring.kl_divergence(mx.array(off), mx.array(on)))
    log_p, log_q = log_softmax(off), log_softmax(on)
    np.testing.assert_allclose(kl, (np.exp(log_p) * (log_p - log_q)).sum(axis=-1), rtol=1e-4)


def test_what_is_not_finite():
    """The figures of a plain text are those of test_independent.py."""
    assert math.isnan(scoring.kl_divergence(mx.array([[1.0, 2.0]]), mx.array([[NAN, 0.0]])).item())
    assert math.isnan(scoring.mean(np.array([1.0])).se)
    assert math.isnan(scoring.perplexity(np.array([NAN, 1.0]), 1, 1).ppl)
    assert scoring.perplexity(np.array([800.0, 800.0]), words=1, n_bytes=1).word_ppl == INF
    without_words = scoring.perplexity(np.array([1.0, 2.0]), words=0, n_bytes=2)
    assert (without_words.word_ppl, without_words.byte_ppl) == (INF, pytest.approx(math.exp(1.5)))


def test_sums_are_float64():
    """A float32 sum of a million tenths is off by 1 %."""
    assert scoring.mean(np.full(1_000_000, 0.1, np.float32)).value == pytest.approx(np.float32(0.1), rel=1e-12)


def scored(*rows):
    """Of a window whose logits these are."""
    return paired._score(mx.array(list(rows)), np.zeros(len(rows) + 1, np.int32), Window(0, len(rows), 1))


@pytest.mark.parametrize(
    ("off", "on", "agrees"),
    [
        ([1.0, 2.0, 0.0], [1.1, 1.9, 0.0], True),
        ([1.0, 2.0, 0.0], [2.1, 1.9, 0.0], False),
        ([16.0, 16.0, 0.0], [16.0, 16.1, 0.0], True),  # a tie may be broken either way
        ([16.0, 16.00001, 0.0], [16.1, 16.0, 0.0], True),  # ... and 5 roundings apart is a tie
        ([16.0, 16.0001, 0.0], [16.1, 16.0, 0.0], False),  # ... and 52 are none
        ([1e-9, 0.0, -1.0], [0.0, 1e-9, -1.0], True),
        ([NAN, 1.0, 0.0], [0.0, 1.0, 0.0], False),
        ([0.0, 1.0, 0.0], [NAN, 1.0, 0.0], False),
        ([NAN, NAN, NAN], [NAN, NAN, NAN], False),
        ([1.0, NAN, 0.0], [1.0, NAN, 0.0], False),
        ([1.0, INF, 0.0], [1.0, INF, 0.0], False),
        ([1.0, 0.0, -INF], [1.0, 0.0, -INF], True),  # a token that the model may not choose
    ],
)
def test_agreement(off, on, agrees):
    assert top1_agrees(scored(off), scored(on)).tolist() == [agrees]


def test_each_token_for_itself(monkeypatch):
    """However many rows are looked at together, and after windows are joined and cut."""
    kinds = [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [3.0, 3.0, 1.0], [2.0, 2.0, 2.0], [NAN, 1.0, 2.0]]
    off, on = zip(*product(kinds, kinds), strict=True)
    expected = [bool(top1_agrees(scored(a), scored(b))[0]) for a, b in zip(off, on, strict=True)]
    assert 0 < sum(expected) < len(expected)
    for rows in (1, 4, 1000):
        monkeypatch.setattr(paired, "ROWS_AT_ONCE", rows)
        assert top1_agrees(scored(*off), scored(*on)).tolist() == expected
    joined = Scores.join([scored(*on[:7]), scored(*on[7:8]), scored(*on[8:])])
    assert top1_agrees(scored(*off), joined).tolist() == expected
    assert top1_agrees(joined.first(9), scored(*on[:9])).tolist() == [row is not kinds[4] for row in on[:9]]


def test_ties_are_kept_while_they_are_few():
    """A model that likes all of 150,000 tokens the same must not fill the memory."""
    assert len(scored([0.0] * 1000).ties) == paired.TIES_KEPT


@given(st.lists(st.integers(0, 100), max_size=4), st.integers(1, 40), st.data())
def test_each_token_but_the_first_is_scored_once_and_in_order(lengths, context, data):
    """Of each stream, behind nothing of another."""
    found, start = iter(windows(lengths, context, data.draw(st.integers(1, context)))), 0
    for length in lengths:
        scored = [0]
        while scored[-1] < length - 1:
            begin, end, first_scored = next(found)
            assert start <= begin < end < start + length
            scored += range(first_scored - start, end - start + 1)
        assert scored == list(range(max(1, length)))
        start += length
    assert not list(found)


@given(st.lists(st.integers(), max_size=100), st.integers(1, 20), st.data())
def test_as_lm_evaluation_harness_rolls_its_windows(text, context, data):
    """Pairs of what the model reads and what it predicts, behind a prefix.

    The first predicts as many tokens as the model can read; each later one `context - context_len + 1` of those that
    are left, or all, and reads the `context` tokens that stand before the last of them.
    """
    context_len = data.draw(st.integers(1, context))
    ids = [-1, *text]
    expected = []
    predicted = 0
    while predicted < len(text):
        more = context - context_len + 1 if predicted else context
        upto = min(predicted + more, len(text))
        expected.append((ids[max(0, upto - context) : upto], text[predicted:upto]))
        predicted = upto
    plan = windows([len(ids)], context, context - context_len + 1)
    assert [(ids[w.begin : w.end], ids[w.first_scored : w.end + 1]) for w in plan] == expected
