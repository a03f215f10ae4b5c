"""An array mask has a block map, which is computed once and changes no result.

For each block of 32 queries and 32 keys, the block map tells whether the mask leaves any key visible in the block, and
whether the mask hides a key or adds a number there.
"""

import gc

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import _ext, flash_attention, masks
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

from tests.core.array_cases import NAMES, as_array, drawn, expected_map, map_of, visible
from tests.core.gradient_oracle import assert_both_ways
from tests.core.oracle import DTYPES, assert_same_bits, draw
from tests.promises import promise

LENGTHS = [(40, 300), (100, 333), (300, 300)]


@pytest.fixture
def call(rng):
    return draw(rng, batch=(2,), heads=4, kv_heads=2, length=100, key_len=333, dim=24)


@pytest.mark.rotate(1, default=6)
@pytest.mark.parametrize("kind", ["bool", "additive", "hiding"])
@pytest.mark.parametrize("name", NAMES)
def test_the_rules_hold(rng, name, kind):
    length, key_len = LENGTHS[NAMES.index(name) % len(LENGTHS)]
    query, key, value = draw(rng, batch=(2,), heads=4, kv_heads=2, length=length, key_len=key_len, dim=24)
    assert_both_ways(query, key, value, mask=as_array(kind, visible(name, rng, length, key_len), rng))


@promise("a block map changes no result, beside every other mask")
@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize("other", ["causal", "window", "key range", "tree", "bias", "sinks"])
def test_beside_other_masks(rng, call, other):
    beside = {
        "causal": Causal(),
        "window": SlidingWindow(70),
        "key range": KeyRange(mx.array([3, 40]), mx.array([290, 333])),
        "tree": Tree(mx.array(rng.random((40, 40)) > 0.5)),
        "bias": masks.And((as_array("additive", visible("gap", rng, 100, 333), rng),)),
        "sinks": Causal(),
    }[other]
    options = {"sinks": mx.array(rng.standard_normal(4), mx.float32)} if other == "sinks" else {}
    assert_both_ways(*call, mask=beside & as_array("bool", visible("documents", rng, 100, 333), rng), **options)


@promise("an array's block map agrees with it")
@pytest.mark.parametrize("dtype", ["bool", *DTYPES])
@pytest.mark.parametrize(
    "shape", [(333,), (1, 333), (100, 1), (100, 333), (4, 100, 333), (2, 1, 1, 333), (2, 4, 100, 333)], ids=str
)
def test_what_it_says(rng, shape, dtype):
    mask = drawn(rng, shape, mx.bool_ if dtype == "bool" else DTYPES[dtype])
    found = np.array(map_of(mask, 100, 333))
    np.testing.assert_array_equal(found, expected_map(mask.reshape(1, -1) if mask.ndim < 2 else mask))


@promise("a block map takes a byte for each block of 32 rows and 32 keys")
def test_its_memory():
    mask = mx.ones((1000, 1000), mx.bool_)
    assert map_of(mask, 1000, 1000).nbytes == 32 * 32


def test_what_is_broadcast_is_read_once(rng):
    row = mx.array(rng.random((2, 1, 1, 4096)) > 0.2)
    found = map_of(mx.broadcast_to(row, (2, 8, 2048, 4096)), 2048, 4096)
    mx.eval(row)
    before = mx.get_active_memory()
    mx.eval(found)
    assert mx.get_active_memory() - before < 16 * 1024
    np.testing.assert_array_equal(np.array(found), np.array(map_of(row, 2048, 4096)).repeat(8, 1).repeat(64, 2))


class TestFoundOnce:
    @promise("the layers of one evaluation share a block map")
    @pytest.mark.parametrize("dtype", [mx.bool_, mx.int32])
    def test_of_one_array(self, dtype):
        mask = mx.ones((300, 300), dtype)
        maps = [map_of(m, 300, 300) for m in (mask, mask, Causal() & mask)]  # the list keeps them, so no id is reused
        assert len({_ext.array_id(each) for each in maps}) == 1

    def test_written_in_place_it_has_one_map_again(self):
        mask = mx.ones((300, 300), mx.bool_)
        found = [map_of(mask, 300, 300)]
        mask[:, :40] = False
        found += [map_of(mask, 300, 300) for _ in range(2)]
        before, now, again = map(_ext.array_id, found)
        assert before != now
        assert now == again

    @promise("an array mask written in place or through a view gets a new block map")
    @pytest.mark.parametrize("after", ["evaluation", "nothing"])
    def test_written_through_a_view_it_is_another(self, rng, call, after):
        mask = mx.zeros((100, 333), mx.bool_)
        mx.eval(mask)
        first = flash_attention(*call, mask=mask)
        if after == "evaluation":
            mx.eval(first)
        np.array(mask, copy=False)[:, 40:75] = True
        now = mx.array(np.array(mask))
        assert_same_bits(flash_attention(*call, mask=mask), flash_attention(*call, mask=now))

    def test_as_long_as_the_mask_lives(self, call):
        gc.collect()  # frees the masks of earlier tests
        before = len(masks._kept)
        mask = mx.ones((100, 333), mx.bool_)
        with masks._keeping:
            assert masks._keeping.acquire(blocking=False)  # as in a signal's handler
            masks._keeping.release()
        mx.eval(flash_attention(*call, mask=mask))
        assert len(masks._kept) == before + 1
        del mask
        gc.collect()
        assert len(masks._kept) == before


class TestTransforms:
    @pytest.fixture
    def mask(self, rng):
        return as_array("bool", visible("documents", rng, 100, 333), rng)

    def test_compile_without_shapes(self, call, mask):
        function = mx.compile(lambda q, k, v, m: flash_attention(q, k, v, mask=m), shapeless=True)
        shorter = [x[:, :, :n] for x, n in zip(call, (60, 290, 290), strict=True)]
        for arrays, each in [(call, mask), (shorter, mask[:60, :290]), (call, mask[0]), (shorter, mask[0, :290])]:
            assert_same_bits(function(*arrays, each), flash_attention(*arrays, mask=each))

    @promise("a block map works under mx.compile and mx.vmap")
    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_vmap_over_masks(self, call, mask, axis):
        stacked = mx.stack([mask, ~mask, mx.ones_like(mask)], axis)
        mapped = mx.vmap(lambda m: flash_attention(*call, mask=m), in_axes=axis)(stacked)
        for got, each in zip(mapped, (mask, ~mask, mx.ones_like(mask)), strict=True):
            assert_same_bits(got, flash_attention(*call, mask=each))


@pytest.mark.parametrize(("length", "key_len", "has_map"), [(9, 257, True), (8, 4096, False), (100, 256, False)])
def test_few_keys_or_queries_have_none(tmp_path, length, key_len, has_map):
    tensor = mx.zeros((1, 1, key_len, 8))
    out = flash_attention(tensor[:, :, :length], tensor, tensor, mask=mx.ones((length, key_len), mx.bool_))
    mx.export_to_dot(str(tmp_path / "graph"), out)
    assert ("FlashAttentionBlockMap" in (tmp_path / "graph").read_text()) == has_map
