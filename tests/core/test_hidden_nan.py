"""NaN and infinity in a hidden key reach no output. In a visible key they reach the rows that see the key."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

from tests.core.oracle import assert_same_bits, assert_same_but_for_order, draw, to_numpy
from tests.promises import promise

MASKS = {
    "key range": KeyRange(10, 60),
    "window": SlidingWindow(5) & KeyRange(0, 95),
    "tree": KeyRange(4) & Tree(mx.array(np.eye(16, dtype=bool))),
    "bool array": mx.arange(97) % 3 == 0,
    "additive array": mx.where(mx.arange(97) % 3 == 0, 0.5, -mx.inf),
    "causal and array": Causal() & (mx.arange(97) % 2 == 1),
}


@promise("NaN or infinity in a hidden key reaches no output")
@pytest.mark.rotate(13)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"alibi_slopes": mx.array([1.0, 0.5])}], ids=str)
@pytest.mark.parametrize("poison", [mx.nan, mx.inf, -mx.inf])
@pytest.mark.parametrize("length", [1, 8, 16, 97])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value_dim", [24, 64])  # with 64, kernels read whole vectors in place if nothing is hidden
def test_hidden_from_all(rng, value_dim, mask, length, poison, options):
    query, key, value = draw(rng, length=length, key_len=97, value_dim=value_dim)
    identity = mx.broadcast_to(mx.eye(97), (1, 2, 97, 97))
    seen = (flash_attention(query, key, identity, mask=MASKS[mask]) > 0).any(axis=(0, 1, 2))
    poisoned = [mx.where(seen[:, None], x, poison) for x in (key, value)]
    assert not seen.all()
    clean = flash_attention(query, key, value, mask=MASKS[mask], return_lse=True, **options)
    got = flash_attention(query, *poisoned, mask=MASKS[mask], return_lse=True, **options)
    for a, b in zip(got, clean, strict=True):
        assert_same_but_for_order(a, b)  # NaN and infinity in values make kernels sum in another order


@pytest.mark.parametrize("poison", [mx.nan, mx.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("length", [8, 97])
def test_hidden_from_some(rng, length, where, poison):
    # Under a causal mask a key with NaN reaches the queries from its position on, but no earlier query.
    query, key, value = draw(rng, length=length, key_len=97)
    at = 92
    poisoned = mx.where((mx.arange(97) == at)[:, None], poison, key if where == "key" else value)
    out = flash_attention(query, *((poisoned, value) if where == "key" else (key, poisoned)), mask="causal")
    clean = flash_attention(query, key, value, mask="causal")
    first_seeing = at - (97 - length)
    assert_same_but_for_order(out[:, :, :first_seeing], clean[:, :, :first_seeing])
    reached = ~np.isfinite(to_numpy(out)[:, :, first_seeing:])
    if where == "value" or np.isnan(poison):
        assert reached.all()
    else:  # rows whose score of this key is -inf give the key no weight and stay finite
        assert reached.any()


@pytest.mark.parametrize("where", ["query", "additive mask"])
@pytest.mark.parametrize("length", [1, 8, 33])
def test_in_a_row_s_query_or_mask_it_reaches_that_row(rng, length, where):
    query, key, value = draw(rng, length=length, key_len=65)
    mask = mx.zeros((length, 65))
    if where == "query":
        query[..., -1, 7] = mx.nan
    else:
        mask[-1, 5] = mx.nan
    out, lse = (to_numpy(a) for a in flash_attention(query, key, value, mask=mask, return_lse=True))
    assert np.isnan(out[:, :, -1]).all()
    assert np.isnan(lse[:, :, -1]).all()
    assert np.isfinite(out[:, :, :-1]).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 33])
def test_in_a_visible_value_whose_weight_is_zero(rng, length, dtype):
    """NaN must reach out, as in MLX's attention. The key's weight is 0 in float32, but no mask hides the key."""
    value = draw(rng, length=1, key_len=97)[2]
    poisoned = mx.where((mx.arange(97)[:, None] == 5) & (mx.arange(value.shape[-1]) == 3), mx.nan, value)
    key = mx.where(mx.arange(97)[:, None] == 5, -100.0, mx.zeros(value.shape))
    query = mx.ones((value.shape[0], 2 * value.shape[1], length, value.shape[-1]))
    out = to_numpy(flash_attention(query.astype(dtype), key.astype(dtype), poisoned.astype(dtype), 1.0))
    assert np.isnan(out[..., 3]).all()
    assert np.isnan(out).sum() == out[..., 3].size


def test_a_key_of_minus_infinity_has_no_weight(rng):
    # MLX has the same test. The key's scores are -inf, but no mask hides the key.
    query, key = mx.ones((1, 4, 8, 16)), mx.ones((1, 4, 8, 16))
    value = draw(rng, heads=4, kv_heads=4, length=1, key_len=8)[2]
    key[..., 0, :] = -mx.inf
    expected = mx.fast.scaled_dot_product_attention(query, key, value, scale=1.0)
    np.testing.assert_allclose(to_numpy(flash_attention(query, key, value, 1.0)), to_numpy(expected), atol=1e-5)


@pytest.mark.parametrize("length", [1, 8, 33])
def test_beside_visible_keys_in_other_tiles(rng, length):
    # Visible keys lie before and after each hidden one. Scores grow with the position, so the kernel rescales its sums.
    query, key, value = draw(rng, length=length, key_len=1500, value_dim=24)
    key = key * mx.linspace(0.1, 3, 1500)[:, None]
    at = (mx.arange(1500) % 250) == 200
    clean = flash_attention(query, key, value, mask=~at, return_lse=True)
    got = flash_attention(query, key, mx.where(at[:, None], mx.nan, value), mask=~at, return_lse=True)
    for a, b in zip(got, clean, strict=True):
        assert_same_bits(a, b)
