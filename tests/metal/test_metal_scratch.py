"""The scratch that a decode step's launches ask for is bounded, however many rows and keys there are."""

import mlx.core as mx
import pytest
from flashattn_core.attention import lowered

from tests import launches

# Batch, heads, key/value heads, queries, keys, head_dim.
FEW_ROWS = [(1, 14, 2, 1, 32768, 64), (1, 28, 4, 1, 32768, 128), (1, 28, 4, 8, 8192, 128), (1, 32, 8, 8, 8192, 128)]
MANY_ROWS = [(1, 128, 1, 8, 8192, 512), (8, 128, 1, 8, 8192, 512), (64, 64, 8, 8, 131_072, 128)]


def decode(shape):
    """The number of chunks into which the keys are cut, and the bytes of the chunks' partial results."""
    batch, heads, kv_heads, length, keys, dim = shape
    row = mx.zeros((1, 1, 1, 1), mx.bfloat16)  # broadcast: takes no memory
    query = mx.broadcast_to(row, (batch, heads, length, dim))
    key = mx.broadcast_to(row, (batch, kv_heads, keys, dim))
    launch, _merge = launches.forward(lowered(query, key, key, kernel="metal_decode_split"), "metal")
    return launch["split"][2], launch["buffers"]["partials"]


@pytest.mark.parametrize("shape", FEW_ROWS + MANY_ROWS)
def test_of_decode_steps(shape):
    batch, heads, _, length, _, dim = shape
    chunks, partials = decode(shape)
    of_one_chunk = batch * heads * length * (dim + 2) * 4
    assert partials == chunks * of_one_chunk
    assert partials <= max(16 << 20, of_one_chunk)


@pytest.mark.parametrize("shape", FEW_ROWS)
def test_few_rows_are_cut_to_fill_a_gpu(shape):
    _, _, kv_heads, _, _, _ = shape
    assert decode(shape)[0] * kv_heads >= 256
