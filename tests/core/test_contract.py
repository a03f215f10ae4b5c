"""The contract of the CPU kernels, cpu/check.h: refused is what they cannot compute, and nothing else."""

import re

import flashattn_core
import mlx.core as mx
import pytest
from programs import run


def test_each_violation_is_refused_and_its_neighbour_is_not(drivers):
    """driver/contract.cpp breaks it in one place at a time."""
    assert re.fullmatch(r"\d+ expectations\n", run(drivers / "contract"))


def test_a_refusal_reaches_the_caller():
    """Strides that no memory has, which MLX lets anyone make: seen when the call is computed. The stream goes on."""
    query = mx.ones((1, 4, 8))
    with pytest.raises(ValueError, match=r"key has strides that reach over \d+ elements, expected fewer than"):
        mx.eval(flashattn_core.flash_attention(query, mx.as_strided(query, (1, 4, 8), (0, 1 << 50, 1)), query))
    assert mx.array_equal(flashattn_core.flash_attention(query, query, query), query)


@pytest.mark.parametrize("query_len", [4, 40])
def test_no_query_heads(query_len):
    """Nothing to compute, in either direction: keys and values have gradient 0."""
    query, key = mx.zeros((1, 0, query_len, 8)), mx.ones((1, 2, 5, 8))
    assert flashattn_core.flash_attention(query, key, key).shape == query.shape
    gradients = mx.grad(lambda q, k: flashattn_core.flash_attention(q, k, k).sum(), argnums=(0, 1))(query, key)
    assert gradients[0].shape == query.shape
    assert mx.array_equal(gradients[1], mx.zeros_like(key))
