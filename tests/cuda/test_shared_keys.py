"""On Hopper, cuda_prefill splits the keys of its last tiles of queries among several thread blocks, to fill the GPU."""

import mlx.core as mx
import pytest
from flashattn_core.masks import KeyRange, SlidingWindow

from tests.core.oracle import assert_matches_reference, draw, to_numpy
from tests.cuda.cuda_attention import flash_attention
from tests.gpu_calls import described
from tests.promises import promise

FORM = "cuda_prefill_hopper"
MANY = 2100  # keys

harness = pytest.mark.usefixtures("requires_clang")


def of_a_model(heads=28, length=2048, keys=26624, **options):
    return described(FORM, heads=heads, kv_heads=heads // 4, length=length, keys=keys, dim=128, **options)


@pytest.mark.parametrize(
    ("heads", "length", "keys", "whole", "shared"),  # a block has 192 rows; 132 blocks run at once
    [(28, 2048, 26624, 264, 44 * 3), (32, 2048, 26624, 264, 88 * 3), (28, 512, 9000, 0, 84 * 3), (4, 100, 3000, 0, 20)],
)
def test_the_last_blocks_fill_the_gpu(heads, length, keys, whole, shared):
    attention, merge = of_a_model(heads, length, keys)
    assert attention["grid"][0] == whole + shared
    assert attention["buffers"]["partials"] == merge["buffers"]["partials"]
    assert "partials" in merge["outputs"]  # so that the next call waits until the partial results are merged


@pytest.mark.parametrize(
    "call",
    [
        {"length": 4096, "keys": 4096},  # with a causal mask, blocks with few keys keep the GPU busy to the end
        {"mask": SlidingWindow(1024)},
        {"heads": 4, "length": 100, "keys": 1000},  # merging takes longer than the split saves
        {"heads": 132, "length": 192},
        {"dtype": mx.float32, "length": 512},
    ],
    ids=str,
)
def test_all_other_blocks_have_all_their_keys(call):
    assert not any("partials" in launch["buffers"] for launch in of_a_model(**call))


@promise("blocks of cuda_prefill that share the keys of a row give the result of all keys")
@harness
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("mask", [None, "causal", "key range", "bool"])
def test_the_result_is_that_of_all_keys(rng, mask, length, dim):
    """With the key-range mask, the second sequence of the batch sees only keys of the last chunk, and the third
    sees nothing.
    """
    sizes = {"batch": (3,), "heads": 2, "kv_heads": 1, "length": length, "key_len": MANY, "dim": dim}
    arrays = draw(rng, **sizes, dtype="bfloat16")
    if mask == "key range":
        mask = KeyRange(mx.array([3, MANY - 50, MANY]))
    elif mask == "bool":
        mask = mx.array(rng.random((length, MANY)) < 0.5)
    assert_matches_reference(*arrays, mask=mask, kernel=FORM, attention=flash_attention)


@harness
def test_hidden_nan_reaches_nothing(rng):
    """The hidden key is in a tile with visible keys. So merged rows are not finite, and must be computed again."""
    query, *stored = draw(rng, length=20, key_len=MANY, dim=64, dtype="float16")
    hidden = mx.arange(MANY) == 700
    out, clean = (
        flash_attention(
            query, *(mx.where(hidden[:, None], x, array) for array in stored), mask=~hidden[None], kernel=FORM
        )
        for x in (mx.nan, 0)
    )
    assert abs(to_numpy(out) - to_numpy(clean)).max() < 1e-3


@harness
def test_large_scores_are_computed_again():
    """All scores are about 3e9, where neighbouring float32 numbers are 256 apart."""
    attention, _ = described(FORM, heads=1, kv_heads=1, length=20, keys=MANY, dim=8, mask=None)
    assert "partials" in attention["outputs"]  # blocks share these keys
    query, key = mx.full((1, 1, 20, 8), 3000.0, mx.bfloat16), mx.full((1, 1, MANY, 8), 3000.0, mx.bfloat16)
    out = flash_attention(query, key, mx.ones_like(key), 1000 / 24, kernel=FORM)
    assert (to_numpy(out) == 1).all()
