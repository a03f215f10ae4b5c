"""One less, equal and one more than the sizes at which the CPU kernels begin something new.

Those are: a tile of keys (288), a band of rows (48 or 64), a block of rows (512), a decode step's run of keys (512).
The rows of a block are the queries of all heads of a group.
"""

import mlx.core as mx
import pytest
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
from gradient_oracle import assert_both_ways
from oracle import assert_matches_reference, draw

KEYS = [287, 288, 289, 511, 512, 513, 577]
ROWS = [(1, 47), (1, 49), (1, 63), (1, 64), (1, 65), (7, 73), (1, 512), (1, 513), (7, 74), (2, 257)]  # heads, queries


def masks(rng, length, key_len):
    return [
        None,
        "causal",
        SlidingWindow(100),
        SlidingWindow(289),
        KeyRange(288),
        Causal() & KeyRange(1, 287),
        mx.array(rng.random((length, key_len)) > 0.4),
    ]


@pytest.mark.rotate(13)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "length"), ROWS)
@pytest.mark.parametrize("turn", range(7))
def test_prefill(rng, dtype, heads, length, turn):
    key_len = KEYS[(turn + ROWS.index((heads, length))) % len(KEYS)]
    query, key, value = draw(
        rng, heads=heads, kv_heads=1, length=length, key_len=key_len, dim=72, value_dim=40, dtype=dtype
    )
    assert_both_ways(query, key, value, mask=masks(rng, length, key_len)[turn])


@pytest.mark.rotate(13)
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("dim", [64, 72])  # read in place, and copied
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decode_with_any_number_of_heads_to_a_key(rng, dtype, dim, heads):
    for key_len in KEYS:
        query, key, value = draw(rng, heads=heads, kv_heads=1, length=1, key_len=key_len, dim=dim, dtype=dtype)
        for mask in (None, SlidingWindow(289), KeyRange(3, 287), mx.array(rng.random(key_len) > 0.4)):
            assert_matches_reference(query, key, value, mask=mask)
