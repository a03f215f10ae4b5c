"""Results and gradients obey oracle.py's rule over a grid of shapes, masks and options.

All combinations would be hundreds of thousands of calls. So test_grid() runs each dtype, head_dim and group of query
heads on each pair of lengths, and changes the mask and the options from call to call. Another test runs each mask with
each option.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.masks import Causal, KeyRange, SlidingWindow, Tree

from tests.core.gradient_oracle import assert_both_ways
from tests.core.oracle import DTYPES, draw
from tests.promises import promise

HEAD_DIMS = [1, 5, 7, 40, 64, 80, 96, 128, 192, 256]
GROUPS = [1, 2, 7, 9, 16]
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 97, 257]
PAIRS = [
    *((n, n) for n in LENGTHS),
    *((1, n) for n in LENGTHS[1:]),
    *((n, 257) for n in (2, 8, 9, 31, 64, 97)),
    *((33, 1), (64, 63), (65, 31), (97, 64), (257, 33)),
    # The CPU's kernels have tiles of 192 or 288 keys, blocks of 512 rows and, in decode steps, splits of 512 keys.
    *((73, 288), (74, 193), (9, 289), (1, 192), (1, 512), (7, 513), (8, 577)),
]


MASK_KINDS = 12


def mask_kinds(rng, length, key_len):
    """Returns functions that each make one mask. They cover each type of mask and some compositions.

    They are functions so that callers make only the masks that they use.
    """
    tree_size = min(length, key_len, 40)
    bools = lambda *shape: mx.array(rng.random(shape) > 0.4)  # noqa: E731
    normal = lambda *shape: mx.array(rng.standard_normal(shape, dtype=np.float32))  # noqa: E731
    half = mx.array([0, key_len // 3], mx.int32), mx.array([key_len - key_len // 4, key_len], mx.int32)
    kinds = [
        lambda: None,
        lambda: "causal",
        lambda: SlidingWindow(17),
        lambda: KeyRange(*half),
        lambda: Tree(bools(tree_size, tree_size)),
        lambda: bools(length, key_len),
        lambda: normal(2, 1, length, key_len),
        lambda: Causal() & KeyRange(*half),
        lambda: SlidingWindow(40) & KeyRange(1) & bools(1, key_len),
        lambda: Causal() & Tree(bools(2, tree_size, tree_size)),
        lambda: Causal() & bools(2, 1, length, key_len) & normal(key_len),
        lambda: SlidingWindow(64) & KeyRange(0, key_len - 1) & Tree(bools(tree_size, tree_size)) & normal(length, 1),
    ]
    assert len(kinds) == MASK_KINDS  # tests index this list with range(MASK_KINDS)
    return kinds


def option_kinds(rng, heads):
    sinks = mx.array(rng.standard_normal(heads, dtype=np.float32))
    slopes = mx.array(rng.random(heads, dtype=np.float32))
    choices = itertools.product(({}, {"softcap": 4.0}), ({}, {"sinks": sinks}), ({}, {"alibi_slopes": slopes}))
    return [{**a, **b, **c} for a, b, c in choices]


@promise("head sizes from 1 to 512 work in every dtype, and lse merges partial results")
@pytest.mark.rotate(19, default=38)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grid(rng, dtype, dim, group):
    turn = HEAD_DIMS.index(dim) + 5 * group
    for i, (length, key_len) in enumerate(PAIRS):
        query, key, value = draw(
            rng, batch=(2,), heads=group, kv_heads=1, length=length, key_len=key_len, dim=dim, dtype=dtype
        )
        mask = mask_kinds(rng, length, key_len)[(turn + i) % MASK_KINDS]()
        options = option_kinds(rng, group)[(turn + 3 * i) % 8]
        assert_both_ways(query, key, value, **in_dtype(query.dtype, mask, options))


@promise("the error against float64 is at most twice that of the unfused formula, plus 1e-5, forward and backward")
@pytest.mark.rotate(7)
@pytest.mark.parametrize("mask_turn", range(MASK_KINDS))
@pytest.mark.parametrize("option_turn", range(8))
def test_each_mask_with_each_option(rng, mask_turn, option_turn):
    for length, key_len in [(1, 65), (5, 97), (65, 65), (33, 97), (97, 33), (70, 320)]:
        query, key, value = draw(rng, batch=(2,), heads=4, length=length, key_len=key_len, dim=40, value_dim=24)
        mask = mask_kinds(rng, length, key_len)[mask_turn]()
        assert_both_ways(query, key, value, mask=mask, **option_kinds(rng, 4)[option_turn])


@pytest.mark.parametrize("dims", [(16, 200), (256, 16), (512, 512), (3, 1)], ids=str)
def test_head_and_value_dims(rng, dims):
    query, key, value = draw(rng, heads=14, length=40, key_len=300, dim=dims[0], value_dim=dims[1])
    assert_both_ways(query, key, value, mask="causal")


def in_dtype(dtype, mask, options):
    """Returns mask and options. Casts sinks and additive masks to `dtype`: they must promote to query's dtype."""
    return {"mask": cast_arrays(mask, dtype)} | {k: v.astype(dtype) if k == "sinks" else v for k, v in options.items()}


def cast_arrays(mask, dtype):
    """Casts the additive arrays inside of a mask to `dtype`, because they must promote to query's dtype."""
    if isinstance(mask, mx.array):
        return mask if mask.dtype == mx.bool_ else mask.astype(dtype)
    if hasattr(mask, "parts"):
        return type(mask)(tuple(cast_arrays(part, dtype) for part in mask.parts))
    return mask
