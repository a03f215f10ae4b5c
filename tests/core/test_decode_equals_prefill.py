"""A decode step's row equals the same row of a prefill up to rounding, with every option.

Each of up to 8 queries in one call gets the same bits as in a call of its own. Speculative decoding relies on that.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow

from tests.core.oracle import draw, to_numpy
from tests.promises import promise

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": mx.array([0.5, 3.0, -1.0, 0.0])},
    "alibi": {"alibi_slopes": mx.array([0.5, 0.1, 0.0, 1.0])},
}
MASKS = {
    "causal": Causal(),
    "window 5": SlidingWindow(5),
    "window 64": SlidingWindow(64),
    "window 600": SlidingWindow(600),
    "left padding": Causal() & KeyRange(70),
}


@promise("a decode step equals the same row of a prefill, with every option")
@pytest.mark.rotate(5)
@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_rows(rng, mask, option, steps):
    total = 1100
    query, key, value = draw(rng, heads=4, length=total, key_len=total, dtype="float32")
    whole = flash_attention(query, key, value, mask=MASKS[mask], return_lse=True, **OPTIONS[option])
    for end in (steps, 64, 65, 513, 1024, total):
        # In this step the cache holds `end` keys, and the queries are those of the last `steps` positions.
        step = flash_attention(
            query[:, :, end - steps : end], key[:, :, :end], value[:, :, :end],
            mask=MASKS[mask], return_lse=True, kernel="cpu_decode", **OPTIONS[option],
        )  # fmt: skip
        for a, b in zip(step, whole, strict=True):
            np.testing.assert_allclose(to_numpy(a), to_numpy(b)[:, :, end - steps : end], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("length", [1, 9])
def test_long_sums_keep_their_digits(length):
    # One key has weight 1, and 131,071 keys have weight 0.3. If a kernel added these weights one by one in float32, the
    # sum would be wrong by 0.1 %. A kernel that first sums each tile of at least 96 keys rounds the total at most 1,366
    # times, each time by at most 2^-24 of the total.
    bound = 1366 * 2.0**-24
    scores = mx.concatenate([mx.zeros(1), mx.full(131071, np.log(0.3))])
    query, key = mx.ones((1, 1, length, 1)), scores[None, None, :, None]
    out, lse = flash_attention(query, key, mx.ones_like(key), scale=1.0, return_lse=True)
    np.testing.assert_allclose(to_numpy(lse), np.log(1 + 131071 * np.float64(np.float32(0.3))), rtol=0, atol=bound)
    np.testing.assert_allclose(to_numpy(out), 1, rtol=0, atol=2 * bound)


@promise("each of up to 8 queries gets the bits that it gets alone")
@pytest.mark.rotate(5)
@pytest.mark.parametrize("mask", ["causal", SlidingWindow(70), SlidingWindow(600) & KeyRange(4)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (14, 2), (40, 1)])
@pytest.mark.parametrize("key_len", [9, 300, 1100])
def test_each_of_several_has_the_bits_that_it_has_alone(rng, key_len, heads, mask):
    query, key, value = draw(rng, heads=heads[0], kv_heads=heads[1], length=8, key_len=key_len, dim=64)
    together = flash_attention(query, key, value, mask=mask)
    for count in (1, 2, 3, 5):
        for first in range(0, 8, count):
            last = min(first + count, 8)
            seen = key_len - 8 + last
            some = flash_attention(query[:, :, first:last], key[:, :, :seen], value[:, :, :seen], mask=mask)
            np.testing.assert_array_equal(np.array(some), np.array(together[:, :, first:last]))


def test_so_where_results_of_runs_are_merged_in_rounds(rng):
    """A decode step keeps 2 MB of partial results at a time. Here one query has 5 MB of them, and eight have 42 MB."""
    query, key, value = draw(rng, heads=64, kv_heads=1, length=8, key_len=20_000, dim=16, value_dim=512)
    together = flash_attention(query, key, value, mask="causal")
    for first, last in [(0, 1), (2, 5), (7, 8)]:
        seen = 19_992 + last
        some = flash_attention(query[:, :, first:last], key[:, :, :seen], value[:, :, :seen], mask="causal")
        np.testing.assert_array_equal(np.array(some), np.array(together[:, :, first:last]))
    prefill = flash_attention(query, key, value, mask="causal", kernel="cpu_prefill")
    np.testing.assert_allclose(np.array(together), np.array(prefill), rtol=1e-5, atol=2e-6)
