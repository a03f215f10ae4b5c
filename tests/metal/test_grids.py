"""Calls with more rows or threadgroups than GPUs can count are refused, not cut off at 32 bits."""

import flashattn_core
import mlx.core as mx
import pytest
from flashattn_core.attention import lowered

from tests import launches

MANY = 2**16


def call(batch: int, heads: int, kv_heads: int, length: int, kernel: str):
    """A call whose arrays are broadcast from one number in memory."""
    shapes = ((batch, heads, length, 1), (batch, kv_heads, 3, 1), (batch, kv_heads, 3, 1))
    return lowered(*(mx.broadcast_to(mx.zeros(1), shape) for shape in shapes), kernel=kernel)


def grid(device: str, *sizes) -> tuple[int, ...]:
    return launches.forward(call(*sizes), device)[-1]["grid"]


def test_as_many_as_there_may_be():
    assert tuple(grid("metal", MANY, 1, 1, 1, "metal_decode_fast")) == (1, 1, MANY)
    assert tuple(grid("cuda", 2**31 - 1, 1, 1, 1, "cuda_prefill")) == (2**31 - 1, 1, 1)


@pytest.mark.parametrize(
    ("device", "kernel", "batch", "heads"),
    [("cuda", "cuda_prefill", 2**30, 2), ("cuda", "cuda_decode", MANY, MANY)],
)
def test_more_threadgroups(device, kernel, batch, heads):
    with pytest.raises(
        flashattn_core.NoKernelError, match=f"{batch * heads} threadgroups side by side, but GPUs count only up"
    ):
        grid(device, batch, heads, heads, 1, kernel)


@pytest.mark.parametrize("kernel", ["metal_rowwise", "metal_prefill_tg", "cuda_decode", "cuda_rowwise"])
def test_more_queries_of_a_group(kernel):
    length = 2 if "decode" in kernel else MANY
    with pytest.raises(flashattn_core.NoKernelError, match="queries that share a key/value head"):
        grid(kernel.partition("_")[0], 1, 2**31 // length, 1, length, kernel)
