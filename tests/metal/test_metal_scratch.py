"""The scratch memory of a decode step is bounded, however many rows and keys there are."""

import pytest

from tests.gpu_calls import described
from tests.promises import promise

# Batch, heads, key/value heads, queries, keys, head_dim.
FEW_ROWS = [(1, 14, 2, 1, 32768, 64), (1, 28, 4, 1, 32768, 128), (1, 28, 4, 8, 8192, 128), (1, 32, 8, 8, 8192, 128)]
MANY_ROWS = [(1, 128, 1, 8, 8192, 512), (8, 128, 1, 8, 8192, 512), (64, 64, 8, 8, 131_072, 128)]


def chunks_within_bound(kernel, shape):
    """Asserts that partial results need at most 16 MiB, or as much as one chunk. Returns the number of chunks."""
    batch, heads, kv_heads, length, keys, dim = shape
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "keys": keys, "dim": dim}
    launch = described(kernel, **sizes, mask=None, is_huge=True)[0]
    (_, _, chunks), partials = launch["split"], launch["buffers"]["partials"]
    of_one_chunk = batch * heads * length * (dim + 2) * 4  # bytes of out, maximum and sum
    assert partials == chunks * of_one_chunk
    assert partials <= max(16 << 20, of_one_chunk)
    return chunks


@promise("the scratch memory of a decode step on a GPU is bounded")
@pytest.mark.parametrize("shape", FEW_ROWS + MANY_ROWS)
def test_of_decode_steps(shape):
    chunks = chunks_within_bound("metal_decode_split", shape)
    if shape in FEW_ROWS:  # enough threadgroups to fill a GPU
        assert chunks * shape[2] >= 256
