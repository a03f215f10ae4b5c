"""driver/contract.h refuses exactly the calls that the CPU kernels cannot compute."""

import re

import flashattn_core
import mlx.core as mx
import pytest

from tests.core.programs import run


def test_each_violation_is_refused_and_its_neighbour_is_not(drivers):
    """driver/violations.cpp changes one field of a legal call at a time."""
    assert re.fullmatch(r"\d+ expectations\n", run(drivers / "violations"))


@pytest.mark.parametrize("query_len", [4, 40])
def test_no_query_heads(query_len):
    """Without query heads the result is empty, and the gradients of keys and values must be all zeros."""
    query, key = mx.zeros((1, 0, query_len, 8)), mx.ones((1, 2, 5, 8))
    assert flashattn_core.flash_attention(query, key, key).shape == query.shape
    gradients = mx.grad(lambda q, k: flashattn_core.flash_attention(q, k, k).sum(), argnums=(0, 1))(query, key)
    assert gradients[0].shape == query.shape
    assert mx.array_equal(gradients[1], mx.zeros_like(key))
