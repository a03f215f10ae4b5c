"""Each of up to 8 queries at once has the bits that it has alone: speculative decoding verifies what it generates."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention, quantized_flash_attention
from flashattn_core.masks import KeyRange, SlidingWindow
from oracle import draw

MASKS = {"causal": "causal", "window": SlidingWindow(70), "from the fifth on": SlidingWindow(600) & KeyRange(4)}


@pytest.mark.rotate(5)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (14, 2), (40, 1)])
@pytest.mark.parametrize("key_len", [9, 300, 1100])
def test_as_one_by_one(rng, key_len, heads, mask):
    query, key, value = draw(rng, heads=heads[0], kv_heads=heads[1], length=8, key_len=key_len, dim=64)
    together = flash_attention(query, key, value, mask=mask)
    for count in (1, 2, 3, 5):
        for first in range(0, 8, count):
            last = min(first + count, 8)
            seen = key_len - 8 + last
            some = flash_attention(query[:, :, first:last], key[:, :, :seen], value[:, :, :seen], mask=mask)
            np.testing.assert_array_equal(np.array(some), np.array(together[:, :, first:last]))


def test_quantised(rng):
    query, key, value = draw(rng, heads=14, kv_heads=2, length=8, key_len=700, dim=64)
    packed = [mx.quantize(x, group_size=64, bits=8) for x in (key, value)]
    together = quantized_flash_attention(query, *packed, mask="causal")
    for i in range(8):
        seen = [tuple(x[:, :, : 693 + i] for x in tensor) for tensor in packed]
        alone = quantized_flash_attention(query[:, :, i : i + 1], *seen, mask="causal")
        np.testing.assert_array_equal(np.array(alone), np.array(together[:, :, i : i + 1]))
