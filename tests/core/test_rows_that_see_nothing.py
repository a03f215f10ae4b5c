"""A row that sees no key gets 0 as out and -inf as lse, never NaN, also with empty inputs."""

import mlx.core as mx
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow

from tests.core.gradient_oracle import assert_both_ways
from tests.core.oracle import draw
from tests.promises import promise

HIDING_ALL = {
    "bool array": mx.array(False),
    "additive array": mx.array(-mx.inf),
    "key range": KeyRange(5, 5),
    "key range before": KeyRange(-3, 0),
    "key range behind": KeyRange(2000),
    "disjoint": KeyRange(0, 10) & KeyRange(20),
    "causal and range": Causal() & KeyRange(1999),
}


@promise("a row that sees nothing gives 0 and lse -inf, never NaN")
@pytest.mark.rotate(7)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"sinks": mx.array([1.0, -1.0])}, {"alibi_slopes": mx.array([1.0, 2.0])}], ids=str
)
@pytest.mark.parametrize(("length", "key_len"), [(1, 1), (1, 600), (8, 64), (9, 64), (65, 128)])
@pytest.mark.parametrize("mask", HIDING_ALL)
def test_zero_and_minus_infinity(rng, mask, length, key_len, options):
    query, key, value = draw(rng, length=length, key_len=key_len)
    out, lse = flash_attention(query, key, value, mask=HIDING_ALL[mask], return_lse=True, **options)
    assert (out == 0).all()
    assert (lse == -mx.inf).all()


@pytest.mark.slow("2 seconds")
def test_padded_rows_at_tile_multiples(rng):
    # Left padding ends where a tile ends, or one key before or after.
    for padding in (63, 64, 65, 127, 128, 129, 287, 288, 289):
        query, key, value = draw(rng, length=300, key_len=300)
        assert_both_ways(query, key, value, mask=Causal() & KeyRange(padding))


@promise("L = 0 gives an empty output, S = 0 gives 0 and -inf")
@pytest.mark.parametrize("mask", [None, "causal", SlidingWindow(3), KeyRange(0, 4)], ids=str)
@pytest.mark.parametrize("length", [1, 9])
def test_no_keys(mask, length):
    out, lse = flash_attention(
        mx.ones((2, 4, length, 8)), mx.ones((2, 2, 0, 8)), mx.ones((2, 2, 0, 6)), mask=mask, return_lse=True
    )
    assert out.shape == (2, 4, length, 6)
    assert (out == 0).all()
    assert (lse == -mx.inf).all()


@pytest.mark.parametrize("shape", [(2, 4, 0, 8), (0, 4, 3, 8)])
def test_no_queries(shape):
    keys = mx.ones((shape[0], 2, 5, 8))
    out, lse = flash_attention(mx.ones(shape), keys, keys, mask="causal", return_lse=True)
    mx.eval(out, lse)
    assert out.shape == shape
    assert lse.shape == shape[:-1]
