"""Each mask description hides exactly the keys that its row in docs/op.md says."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree, lower

from tests.promises import promise

SIZES = [(1, 1), (1, 70), (3, 5), (5, 3), (33, 64), (64, 33), (65, 65), (8, 130), (9, 130)]


def seen_by_kernel(mask, length, key_len, batch=1):
    """Which keys each query sees, as (batch, L, S). The values are a unit matrix, so out has the weight of each key."""
    query, key = mx.zeros((batch, 1, length, 8)), mx.zeros((batch, 1, key_len, 8))
    value = mx.broadcast_to(mx.eye(key_len), (batch, 1, key_len, key_len))
    return np.asarray(flash_attention(query, key, value, mask=mask) > 0)[:, 0]


def by_sentence(length, key_len, sees):
    return np.array([[[sees(i, j) for j in range(key_len)] for i in range(length)]])


@promise("causal is aligned at the lower right, for any L and S")
@pytest.mark.parametrize(("length", "key_len"), SIZES)
@pytest.mark.parametrize("mask", ["causal", Causal()], ids=str)
def test_causal(length, key_len, mask):
    expected = by_sentence(length, key_len, lambda i, j: j <= i + key_len - length)
    np.testing.assert_array_equal(seen_by_kernel(mask, length, key_len), expected)


@promise("a window of W is the query itself and W - 1 keys before it")
@pytest.mark.rotate(4)
@pytest.mark.parametrize(
    ("length", "key_len", "window"),
    [(*sizes, window) for window in (1, 2, 3, 31, np.array(32), 33, 64, 65, 2**31 - 1, 2**31, 2**70) for sizes in SIZES]
    + [(2, 400, 98), (2, 500, 289), (9, 500, 290), (70, 510, 287)],  # these windows end inside of a tile
)
def test_window_is_itself_and_those_before(length, key_len, window):
    position = lambda i: i + key_len - length  # noqa: E731
    expected = by_sentence(length, key_len, lambda i, j: j <= position(i) and position(i) - j < window)
    np.testing.assert_array_equal(seen_by_kernel(SlidingWindow(window), length, key_len), expected)


@pytest.mark.rotate(5)
@pytest.mark.parametrize(("length", "key_len"), SIZES)
@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (1, None), (2, 3), (0, 64), (-5, 1000), (3, 3), (4, 2), (63, 65)]
)
def test_key_range(length, key_len, start, stop):
    expected = by_sentence(length, key_len, lambda i, j: start <= j < (key_len if stop is None else stop))
    np.testing.assert_array_equal(seen_by_kernel(KeyRange(start, stop), length, key_len), expected)


@promise("key ranges work, one for all or one per element of the batch")
@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64])
def test_key_range_of_each_batch_element(dtype):
    starts, stops = [0, 2, 60, 5], [70, 64, 61, 5]
    seen = seen_by_kernel(KeyRange(mx.array(starts, dtype), mx.array(stops, dtype)), 9, 70, batch=4)
    for b, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        np.testing.assert_array_equal(seen[b], by_sentence(9, 70, lambda i, j, a=start, z=stop: a <= j < z)[0])


def test_key_range_beyond_int32_is_cut_off_not_wrapped():
    far = mx.array([2**40], mx.int64)
    assert seen_by_kernel(KeyRange(0, far), 1, 5).all()
    assert not seen_by_kernel(KeyRange(far), 1, 5).any()
    assert seen_by_kernel(KeyRange(-(2**80), 2**80), 1, 5).all()


@promise("trees work as bool arrays, packed bits or parents")
@pytest.mark.parametrize(
    ("length", "key_len", "size"),
    [(5, 5, 5), (5, 70, 5), (2, 70, 5), (9, 70, 5), (40, 140, 40), (1, 1, 1)]
    + [(40, before + 40, 40) for before in range(283, 293)],  # these trees begin at various places of a tile of keys
)
@pytest.mark.parametrize("packed", [False, True])
def test_tree(rng, length, key_len, size, packed):
    bits = rng.random((size, size)) > 0.5
    tree = Tree(mx.zeros((size, size), mx.bool_))
    mx.eval(tree.bits)
    np.array(tree.visible, copy=False)[:] = bits  # what is written after an evaluation counts in the next one
    mask = Tree(tree.bits) if packed else tree

    def sees(i, j):
        node, other = i + size - length, j - (key_len - size)
        return other < 0 or (node >= 0 and bits[node, other])

    np.testing.assert_array_equal(seen_by_kernel(mask, length, key_len), by_sentence(length, key_len, sees))


@pytest.mark.parametrize("form", ["bool", "packed", "packed, in columns"])
def test_tree_of_each_batch_element(rng, form):
    bits = rng.random((3, 70, 70)) > 0.5
    mask = Tree(mx.array(bits))
    if form != "bool":
        strided = mx.contiguous(mask.bits.transpose(2, 1, 0)).transpose(2, 1, 0)
        mask = Tree(strided if form == "packed, in columns" else mask.bits)
    seen = seen_by_kernel(mask, 70, 107, batch=3)
    assert seen[..., :37].all()
    np.testing.assert_array_equal(seen[..., 37:], bits)


def test_tree_from_parents_sees_itself_and_ancestors():
    #   0 ─ 1 ─ 3
    #   │   └ ─ 4
    #   └ ─ 2       5 (a second root)
    tree = Tree.from_parents([-1, 0, 0, 1, 1, -1])
    ancestors = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {5}]
    assert tree.visible.tolist() == [[j in seen for j in range(6)] for seen in ancestors]


@promise("`&` shows a key if all its masks show it")
def test_composition_shows_what_all_show(rng):
    length, key_len = 33, 97
    array = mx.array(rng.random((length, key_len)) > 0.3)
    tree = Tree(mx.array(rng.random((9, 9)) > 0.3))
    parts = [Causal(), SlidingWindow(50), KeyRange(3, 90), KeyRange(5, None), SlidingWindow(40), array, tree]
    together = parts[0]
    for part in parts[1:]:
        together = together & part
    expected = np.logical_and.reduce([seen_by_kernel(part, length, key_len) for part in parts])
    np.testing.assert_array_equal(seen_by_kernel(together, length, key_len), expected)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lower(Causal() & mx.array([True]) & mx.array([True])), "two masks of kind bool array"),
        (lambda: lower(Causal() & mx.array([1.0]) & mx.array([1.0])), "two masks of kind additive array"),
        (lambda: lower(Tree.from_parents([-1]) & Tree.from_parents([-1])), "two masks of kind Tree"),
    ],
)  # fmt: skip
def test_bad_masks_say_what_was_expected(make, words):
    with pytest.raises(ValueError, match=words):
        make()
