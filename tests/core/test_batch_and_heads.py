"""Calls may have up to eight leading dimensions, and groups of query heads that share a key/value head."""

import mlx.core as mx
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange

from tests.core.gradient_oracle import assert_both_ways
from tests.core.oracle import draw
from tests.promises import promise


@promise("any leading dimensions work")
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (2, 1, 2), (2, 1, 2, 1, 2, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("length", [1, 8, 33])
def test_leading_dimensions(rng, batch, length):
    query, key, value = draw(rng, batch=batch, heads=4, kv_heads=2, length=length, key_len=65)
    assert_both_ways(query, key, value, mask="causal")


def test_masks_follow_the_batch(rng):
    query, key, value = draw(rng, batch=(2, 3), heads=2, length=9, key_len=65)
    start = mx.array([[0, 1, 2], [40, 50, 60]])
    array = mx.array(rng.random((3, 1, 9, 65)) > 0.3)
    assert_both_ways(query, key, value, mask=Causal() & KeyRange(start, 64) & array)


@pytest.mark.rotate(4, default=8)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (2, 1), (6, 3), (14, 2), (28, 4), (7, 1), (71, 1), (100, 1), (200, 2)]
)
@pytest.mark.parametrize(("length", "key_len"), [(1, 33), (1, 1030), (8, 600), (13, 65), (97, 97)])
def test_groups(rng, heads, kv_heads, length, key_len):
    query, key, value = draw(rng, heads=heads, kv_heads=kv_heads, length=length, key_len=key_len)
    assert_both_ways(query, key, value, mask="causal")


@pytest.mark.parametrize("query_len", [4, 40])
def test_no_query_heads(query_len):
    """Without query heads the result is empty, and the gradients of keys and values must be all zeros."""
    query, key = mx.zeros((1, 0, query_len, 8)), mx.ones((1, 2, 5, 8))
    assert flash_attention(query, key, key).shape == query.shape
    gradients = mx.grad(lambda q, k: flash_attention(q, k, k).sum(), argnums=(0, 1))(query, key)
    assert gradients[0].shape == query.shape
    assert mx.array_equal(gradients[1], mx.zeros_like(key))


@promise("query head h reads key/value head h // (H_q // H_kv)")
def test_query_head_reads_its_groups_kv_head():
    query, key = mx.zeros((1, 6, 1, 4)), mx.zeros((1, 3, 1, 4))
    value = mx.broadcast_to(mx.array([10.0, 20.0, 30.0])[None, :, None, None], (1, 3, 1, 1))
    assert flash_attention(query, key, value).flatten().tolist() == [10, 10, 20, 20, 30, 30]
