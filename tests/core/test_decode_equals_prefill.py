"""A decode step's row equals the same row of a prefill, with every option."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
from oracle import draw, to_numpy

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


@pytest.mark.rotate(5)
@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_rows(rng, mask, option, steps):
    total = 1100
    query, key, value = draw(rng, heads=4, length=total, key_len=total, dtype="float32")
    whole = flash_attention(query, key, value, mask=MASKS[mask], return_lse=True, **OPTIONS[option])
    for end in (steps, 64, 65, 513, 1024, total):
        # At this step the cache holds `end` keys and the last `steps` queries come in.
        step = flash_attention(
            query[:, :, end - steps : end], key[:, :, :end], value[:, :, :end],
            mask=MASKS[mask], return_lse=True, kernel="cpu_decode", **OPTIONS[option],
        )  # fmt: skip
        for a, b in zip(step, whole, strict=True):
            np.testing.assert_allclose(to_numpy(a), to_numpy(b)[:, :, end - steps : end], rtol=1e-5, atol=2e-6)


def test_chunked_prefill_equals_one(rng):
    query, key, value = draw(rng, heads=4, length=300, key_len=300)
    whole = flash_attention(query, key, value, mask="causal")
    chunks = [
        flash_attention(query[:, :, a:b], key[:, :, :b], value[:, :, :b], mask="causal")
        for a, b in ((0, 100), (100, 163), (163, 171), (171, 172), (172, 300))
    ]
    np.testing.assert_allclose(to_numpy(mx.concatenate(chunks, axis=2)), to_numpy(whole), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("length", [1, 9])
def test_long_sums_keep_their_digits(length):
    # One key of weight 1 and 131,071 of weight 0.3: added one by one in float32, they would lose 1e-3. Tile by
    # tile, each of 1,366 additions rounds the sum by at most 2^-24 of it.
    bound = 1366 * 2.0**-24
    scores = mx.concatenate([mx.zeros(1), mx.full(131071, np.log(0.3))])
    query, key = mx.ones((1, 1, length, 1)), scores[None, None, :, None]
    out, lse = flash_attention(query, key, mx.ones_like(key), scale=1.0, return_lse=True)
    np.testing.assert_allclose(to_numpy(lse), np.log(1 + 131071 * np.float64(np.float32(0.3))), rtol=0, atol=bound)
    np.testing.assert_allclose(to_numpy(out), 1, rtol=0, atol=2 * bound)
