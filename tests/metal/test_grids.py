"""Calls with more rows or threadgroups than GPUs can count raise an error. Numbers must not be cut off at 32 bits."""

import flashattn_core
import pytest

from tests.gpu_calls import described
from tests.promises import promise

MANY = 2**16


def grid(kernel: str, batch: int, heads: int, kv_heads: int, length: int) -> tuple[int, ...]:
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "keys": 3, "dim": 1}
    return tuple(described(kernel, **sizes, mask=None, is_huge=True)[-1]["grid"])


def test_as_many_as_there_may_be():
    assert grid("metal_decode_fast", MANY, 1, 1, 1) == (1, 1, MANY)
    assert grid("cuda_prefill", 2**31 - 1, 1, 1, 1) == (2**31 - 1, 1, 1)


@promise("a call with more threadgroups than a GPU counts raises NoKernelError")
@pytest.mark.parametrize(("kernel", "batch", "heads"), [("cuda_prefill", 2**30, 2), ("cuda_decode", MANY, MANY)])
def test_more_threadgroups(kernel, batch, heads):
    words = f"{batch * heads} threadgroups side by side, but GPUs count only up"
    with pytest.raises(flashattn_core.NoKernelError, match=words):
        grid(kernel, batch, heads, heads, 1)


@pytest.mark.parametrize("kernel", ["metal_rowwise", "metal_prefill_tg", "cuda_decode", "cuda_rowwise"])
def test_more_queries_of_a_group(kernel):
    length = 2 if "decode" in kernel else MANY
    with pytest.raises(flashattn_core.NoKernelError, match="queries that share a key/value head"):
        grid(kernel, 1, 2**31 // length, 1, length)
