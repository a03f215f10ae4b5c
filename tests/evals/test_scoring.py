"""The statistics, against straightforward float64 numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import scoring
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

# Rows of logits with ties, extremes and a vocabulary of one.
LOGITS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-60, 60, width=32),
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


@given(LOGITS, st.randoms(use_true_random=False))
def test_token_nll(logits: np.ndarray, random: "np.random.Generator") -> None:
    targets = np.array([random.randrange(logits.shape[1]) for _ in logits], np.int32)
    expected = -log_softmax(logits)[np.arange(len(targets)), targets]
    np.testing.assert_allclose(scoring.token_nll(logits, targets), expected, rtol=1e-6, atol=1e-6)


def test_token_nll_of_a_large_vocabulary() -> None:
    """A float32 sum of so many, one after the other, is off by 2e-4, always to the same side."""
    logits = (3 * np.random.default_rng(0).standard_normal((16, 151_936))).astype(np.float32)
    error = scoring.token_nll(logits, np.arange(16)) + log_softmax(logits)[np.arange(16), np.arange(16)]
    assert np.abs(error).max() < 2e-6
    assert abs(error.mean()) < 5e-7


def kl64(off: np.ndarray, on: np.ndarray) -> np.ndarray:
    log_p, log_q = log_softmax(off), log_softmax(on)
    return (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100])
def test_kl_is_exact_from_rounding_noise_to_nonsense(size: float) -> None:
    """Where the usual float32 sum gives 1e-8 of noise, the value itself is 1e-11 and must come out."""
    random = np.random.default_rng(0)
    off = (random.standard_normal((64, 500)) * 4).astype(np.float32)
    on = (off + random.standard_normal(off.shape) * size).astype(np.float32)
    kl = np.array(scoring.kl_divergence(mx.array(off), mx.array(on)))
    np.testing.assert_allclose(kl, kl64(off, on), rtol=1e-4)


@given(LOGITS, st.floats(-5, 5))
def test_kl_of_a_shifted_copy_is_zero(logits: np.ndarray, shift: float) -> None:
    """Softmax does not see a constant; float32 rounds it away differently in each logit, hence not exactly 0."""
    shifted = (logits + np.float32(shift)).astype(np.float32)
    assert np.array(scoring.kl_divergence(mx.array(logits), mx.array(shifted))).max() <= 1e-10


def test_kl_says_that_a_broken_arm_is_broken() -> None:
    off = mx.array([[1.0, 2.0]])
    assert math.isnan(scoring.kl_divergence(off, mx.array([[math.nan, 0.0]])).item())


@given(hnp.arrays(np.float64, st.integers(2, 50), elements=st.floats(0, 20)))
def test_mean_and_its_standard_error(values: np.ndarray) -> None:
    average, se = scoring.mean(values)
    n = len(values)
    assert average == pytest.approx(sum(values) / n, abs=1e-12)
    assert se == pytest.approx(math.sqrt(sum((values - average) ** 2) / (n - 1) / n), abs=1e-12)


def test_sums_are_float64() -> None:
    """A float32 sum of a million tenths is off by 1 %."""
    assert scoring.mean(np.full(1_000_000, 0.1, np.float32)).value == pytest.approx(np.float32(0.1), rel=1e-12)


def test_one_token_has_no_standard_error() -> None:
    assert math.isnan(scoring.mean(np.array([1.0])).se)


@given(hnp.arrays(np.float64, st.integers(2, 50), elements=st.floats(0, 12)), st.integers(1, 60), st.integers(1, 300))
def test_perplexity_per_token_word_and_byte(nll: np.ndarray, words: int, n_bytes: int) -> None:
    result = scoring.perplexity(nll, words, n_bytes)
    assert result.ppl == pytest.approx(np.exp(nll.mean()))
    assert result.ppl_se == pytest.approx(np.exp(nll.mean()) * nll.std(ddof=1) / np.sqrt(len(nll)))
    assert math.log(result.word_ppl) == pytest.approx(nll.sum() / words)
    assert math.log(result.byte_ppl) == pytest.approx(nll.sum() / n_bytes)
    assert result.bits_per_byte == pytest.approx(nll.sum() / n_bytes / np.log(2))


def test_a_text_without_a_word_has_no_finite_word_perplexity() -> None:
    result = scoring.perplexity(np.array([1.0, 2.0]), words=0, n_bytes=2)
    assert result.word_ppl == math.inf
    assert result.byte_ppl == pytest.approx(math.exp(1.5))


def test_without_a_text_there_is_nothing_per_word_and_byte() -> None:
    result = scoring.perplexity(np.array([1.0, 2.0]), None, None)
    assert result.ppl == pytest.approx(math.exp(1.5))
    assert (result.word_ppl, result.byte_ppl, result.bits_per_byte) == (None, None, None)


def test_a_perplexity_beyond_float64_is_infinite_and_one_of_nothing_is_none() -> None:
    assert scoring.perplexity(np.array([800.0, 800.0]), 1, 1).word_ppl == math.inf
    assert math.isnan(scoring.perplexity(np.array([math.nan, 1.0]), 1, 1).ppl)
