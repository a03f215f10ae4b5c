"""softcap, sinks, ALiBi and scale each agree with the reference."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.reference import reference_attention

from tests.core.gradient_oracle import assert_both_ways
from tests.core.oracle import draw, to_numpy, unfused
from tests.promises import promise

LENGTHS = [(1, 1), (1, 130), (8, 33), (9, 64), (65, 97), (130, 31)]
OPTIONS = {
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": mx.array([0.5, -3.0, 8.0, 2.0])},
    "alibi": {"alibi_slopes": mx.array([0.5, 0.25, 0.0, 2.0])},
}


@promise("softcap, sinks, ALiBi and scale agree with the reference, and none is ignored")
@pytest.mark.parametrize(("length", "key_len"), LENGTHS)
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("option", OPTIONS)
def test_against_reference(rng, option, mask, length, key_len):
    query, key, value = draw(rng, heads=4, length=length, key_len=key_len, dim=24, value_dim=17)
    assert_both_ways(query, key, value, mask=mask, **OPTIONS[option])


@pytest.mark.parametrize("length", [1, 65])
def test_softcap_is_exact_far_from_and_close_to_zero(length):
    # Each row has one key, so a row's lse is its capped score.
    scores = np.concatenate([[0.0, 1e-30], np.logspace(-8, 4, 61)]).astype(np.float32)
    scores = np.concatenate([scores, -scores])
    query = mx.broadcast_to(mx.array(scores)[:, None, None, None], (scores.size, 1, length, 1))
    key = value = mx.ones((scores.size, 1, 1, 1))
    _, lse = flash_attention(query, key, value, scale=1.0, softcap=30.0, return_lse=True)
    expected = 30 * np.tanh(scores.astype(np.float64) / 30)
    np.testing.assert_allclose(np.asarray(lse)[:, 0, 0], expected, rtol=1e-6, atol=0)


def test_softcap_rounds_no_query():
    """Here the scores are exact in float32. A kernel that divided the queries by softcap would round them."""
    rng = np.random.default_rng(0)
    query, key, value = (
        mx.array(rng.integers(-24, 25, (1, heads, rows, 96)).astype(np.float32) / 8)
        for heads, rows in ((2, 40), (1, 50), (1, 50))
    )
    how = {"scale": 0.25, "softcap": 50.0}
    expected, _ = reference_attention(*map(to_numpy, (query, key, value)), **how)
    error, unfused_error = (
        np.abs(to_numpy(out) - expected).max()
        for out in (flash_attention(query, key, value, **how), unfused(query, key, value, **how)[0])
    )
    assert error <= 2 * unfused_error + 1e-6


@pytest.mark.parametrize("option", ["sinks", "alibi_slopes"])
def test_sinks_and_slopes_may_have_a_dtype_of_their_own(rng, option):
    arrays, numbers = draw(rng, heads=4, length=9, key_len=33), mx.array([1.0, 3.0, 8.0, 2.0])
    expected = flash_attention(*arrays, **{option: numbers})
    for dtype in (mx.float16, mx.bfloat16, *([mx.int32] if option == "sinks" else [])):
        assert mx.array_equal(flash_attention(*arrays, **{option: numbers.astype(dtype)}), expected)


@pytest.mark.parametrize("sink", [-1e4, -mx.inf, 1e4])
def test_extreme_sinks(rng, sink):
    query, key, value = draw(rng, length=9, key_len=33)
    assert_both_ways(query, key, value, sinks=mx.array([sink, 0.0]))


def test_alibi_counts_distance_on_both_sides():
    # Without a mask, a query also has distances to later keys. Query 1 of 3 has the distances 1, 0 and 1.
    query, key, value = mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)), mx.eye(3)[None, None]
    out = flash_attention(query, key, value, alibi_slopes=mx.array([1.0]))
    expected = np.exp([-1.0, 0.0, -1.0])
    np.testing.assert_allclose(to_numpy(out)[0, 0, 1], expected / expected.sum(), rtol=1e-6)
