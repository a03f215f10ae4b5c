"""What the kernels do, counted, beside MLX's own on the same shapes: prefill and decode of Qwen2-0.5B and 7B.

One key/value head and the query heads that share it: every other head costs the same.
"""

import mlx.core as mx
import numpy as np
import pytest
from beside_mlx import GROUP, HEAD_DIMS, decode, prefill, total
from flashattn_core.masks import KeyRange, SlidingWindow
from metal_attention import run
from metal_on_cpu import Counts
from oracle import draw

DTYPES = ["float32", "float16", "bfloat16"]


def assert_no_more(ours: Counts, theirs: Counts, lse_bytes: int = 0) -> None:
    """`lse_bytes`: of an output that theirs does not have."""
    assert sum(ours.mma.values()) <= sum(theirs.mma.values())
    assert ours.device_read + ours.device_written <= theirs.device_read + theirs.device_written + lse_bytes
    assert ours.threadgroup_read + ours.threadgroup_written <= theirs.threadgroup_read + theirs.threadgroup_written
    assert ours.barriers <= theirs.barriers


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [256, 512])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", HEAD_DIMS)
def test_prefill_beside_steel_attention(rng, model, dtype, length, causal):
    counts = prefill(rng, HEAD_DIMS[model], dtype, length, causal)
    assert_no_more(counts["ours"], counts["steel_attention"])
    assert counts["ours"].mma.keys() == {"float"}  # float32 arithmetic


@pytest.mark.parametrize("key_len", [512, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", HEAD_DIMS)
def test_decode_beside_sdpa_vector(rng, model, dtype, key_len):
    counts = decode(rng, HEAD_DIMS[model], dtype, key_len)
    ours = counts.pop("ours")
    for theirs in counts.values():
        assert_no_more(ours, theirs, lse_bytes=4 * GROUP)


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_split_reads_each_key_and_value_once(rng, dtype, group, length):
    query, key, value = draw(rng, heads=group, kv_heads=1, length=length, key_len=300, dim=64, dtype=dtype)
    result = run(query, key, value, kernel="metal_decode_split")
    assert result.chunks > 1
    assert result.counts[0].device_read == key.nbytes + value.nbytes + result.chunks * query.nbytes


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_reg_writes_only_keys_and_values_to_threadgroup_memory(rng, dtype, dim):
    # No mask: each of the threadgroups copies each key and value once, and nothing else.
    arrays = draw(rng, heads=1, kv_heads=1, length=128, key_len=96, dim=dim, dtype=dtype)
    (counts,) = run(*arrays, kernel="metal_prefill_reg").counts
    threadgroups = 2 if dim <= 128 else 4  # of 64 queries, or 32
    assert counts.threadgroup_written == threadgroups * (arrays[1].nbytes + arrays[2].nbytes)


MASKS = {
    "window": (SlidingWindow(20), 20),
    "key range": (KeyRange(100, 140), 40),
    "window and range": (SlidingWindow(50) & KeyRange(0, 480), 30),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("kernel", "length"),
    [
        ("metal_decode_fast", 1),
        ("metal_decode_parallel", 1),
        ("metal_decode_split", 1),
        ("metal_decode_split", 8),
        ("metal_prefill_tg", 8),
        ("metal_prefill_reg", 8),
        ("metal_rowwise", 8),
    ],
)
def test_hidden_tiles_are_not_read(rng, kernel, length, mask):
    query, key, value = draw(rng, heads=1, kv_heads=1, length=length, key_len=500, dim=64)
    described, seen = MASKS[mask]
    counts = total(run(query, key, value, mask=described, kernel=kernel).counts)
    # The keys that some query sees, and what a tile has around them; queries and key ranges, as each of 32 SIMD groups
    # reads them; partial results.
    keys = seen + length - 1 + (64 if kernel == "metal_prefill_reg" else 0)
    assert counts.device_read <= 2 * keys * 64 * 4 + 32 * (query.nbytes + 2 * 4 * 32) + counts.device_written
    assert counts.device_read < (key.nbytes + value.nbytes) / 2


def test_fully_visible_tiles_read_no_mask(rng):
    # Causal, 256 queries and keys: only tiles on the diagonal compare positions. A mask array would be read everywhere.
    query, key, value = draw(rng, heads=1, kv_heads=1, length=256, key_len=256, dim=64)
    plain = run(query, key, value, mask="causal").counts[0]
    array = run(query, key, value, mask=mx.array(np.tri(256, dtype=bool))).counts[0]
    assert array.device_read > plain.device_read + 256 * 256
