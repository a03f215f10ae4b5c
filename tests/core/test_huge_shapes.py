"""Huge shapes work: a million keys or queries, and more elements than 32 bits can count.

Overlapping and broadcast views keep the arrays small in memory.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import KeyRange, SlidingWindow

from tests.core.oracle import to_numpy
from tests.core.programs import run
from tests.promises import promise

MILLION = 1 << 20
MOST_KEYS = 2**31 - 1 - 1024  # the largest sum of query's and key's lengths
DIM = 64


def test_a_million_queries_and_keys_in_a_window(rng):
    numbers = rng.standard_normal(MILLION).astype(np.float32)
    x = mx.array(numbers).reshape(1, 1, MILLION, 1)
    out = to_numpy(flash_attention(x, x, x, mask=SlidingWindow(2)))[0, 0, :, 0]
    before, own = numbers[:-1].astype(np.float64), numbers[1:].astype(np.float64)
    weight = 1 / (1 + np.exp(own * (before - own)))  # the softmax weight of each query's own key
    np.testing.assert_allclose(out[1:], weight * own + (1 - weight) * before, rtol=1e-4, atol=1e-5)
    assert out[0] == numbers[0]


@promise("a million keys or queries work, and so do more than 2^31 elements")
@pytest.mark.parametrize("length", [1, 9])
def test_more_than_2_to_the_31_elements(rng, length):
    """One key is repeated so often that int32 cannot count the elements. The result must be the key's value."""
    count = (1 << 25) + 3
    key, value = (mx.array(rng.standard_normal((1, 1, 1, DIM)).astype(np.float32)) for _ in range(2))
    query = mx.random.normal((1, 1, length, DIM))
    views = [mx.broadcast_to(a, (1, 1, count, DIM)) for a in (key, value)]
    assert views[0].size > 2**31
    mask = KeyRange(count - 1000) if length > 8 else None
    seen = 1000 if length > 8 else count
    out, lse = flash_attention(query, *views, mask=mask, return_lse=True)
    # Kernels sum each split of 512 keys in float32, and then add the splits. So the error grows with the number of keys
    # in a split and with the number of splits.
    np.testing.assert_allclose(
        to_numpy(out), np.broadcast_to(to_numpy(value), out.shape), rtol=(512 + seen / 512) * 2**-24
    )
    scores = (query * key).sum(axis=-1) / DIM**0.5
    np.testing.assert_allclose(to_numpy(lse), to_numpy(scores) + np.log(seen), rtol=1e-4)


def test_rows_further_apart_than_32_bits_count(drivers, everything):
    """driver/far_apart.cpp tests far-apart rows in every array of a call, forward and backward."""
    cases = 100 if everything else 30  # case 21 is the first with more than one tile of keys
    assert run(drivers / "far_apart", cases) == f"{cases} cases, the same bits\n"


@pytest.mark.parametrize("length", [1, 9])
def test_the_last_positions_that_there_are(rng, length):
    """Windows and ALiBi must be right just below position 2^31, in a call with the largest allowed number of keys."""
    key, value = (mx.broadcast_to(mx.array(x), (1, 1, MOST_KEYS - length, 1)) for x in (0.5, 2.0))
    query = mx.ones((1, 1, length, 1))
    out, lse = flash_attention(query, key, value, mask=SlidingWindow(3), alibi_slopes=mx.array([1.0]), return_lse=True)
    assert (out == 2).all()
    np.testing.assert_allclose(to_numpy(lse), 0.5 + np.log(1 + np.exp(-1) + np.exp(-2)), rtol=1e-6)
