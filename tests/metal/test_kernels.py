"""Each kernel, each dtype, groups of 1, 2 and 7 heads, every mask and option, ragged lengths around every tile edge.

Masks, options, lengths and schedules take turns, so that each kernel meets each of them; every run is checked for
races, bounds and uninitialised memory by itself.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.reference import reference_attention
from metal_attention import run
from oracle import assert_matches_reference, draw, to_numpy
from test_grid import cast_arrays, mask_kinds, option_kinds

SCHEDULES = ["forward", "reverse", "greedy", "random:1", "random:2"]

ONE = [(1, n) for n in (1, 2, 3, 4, 5, 31, 32, 33, 63, 127, 128, 129, 131, 257)]
FEW = [(1, 63), (1, 64), (1, 65), (2, 2), (3, 129), (5, 4), (7, 7), (8, 3), (8, 200), (4, 256), (1, 1), (6, 61)]
SHORT = [(1, 1), (2, 31), (4, 32), (5, 33), (8, 8), (9, 7), (16, 65), (17, 16), (23, 64), (33, 40), (3, 95), (11, 97)]
LONG = [
    (1, 1),
    (7, 33),
    (31, 31),
    (32, 32),
    (33, 64),
    (63, 65),
    (64, 63),
    (65, 97),
    (64, 1),
    (66, 32),
    (97, 31),
    (8, 96),
]
# For kernels with other tiles when there are many queries.
LONGER = [(65, 65), (66, 127), (127, 64), (128, 128), (129, 33), (80, 16), (96, 15), (72, 17)]

CASES = {
    "metal_decode_fast": (ONE, [64, 40]),
    "metal_decode_parallel": (ONE, [64, 40]),
    "metal_decode_split": (FEW, [64, 40]),
    "metal_prefill_tg": (SHORT, [64, 40]),
    "metal_prefill_reg": (LONG + LONGER, [64, 40]),
    "metal_rowwise": (LONG, [64, 40]),
}


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kernel", CASES)
def test_grid(rng, kernel, dtype, group):
    lengths, dims = CASES[kernel]
    turn = 5 * group + len(dtype)
    for i in range(max(len(lengths), 12)):
        length, key_len = lengths[i % len(lengths)]
        dim = dims[i % len(dims)]
        query, key, value = draw(
            rng, batch=(2,), heads=group, kv_heads=1, length=length, key_len=key_len, dim=dim, dtype=dtype
        )
        masks = mask_kinds(rng, length, key_len)
        options = option_kinds(rng, group)[(turn + 3 * i) % 8]
        options = {k: v.astype(query.dtype) if k == "sinks" else v for k, v in options.items()}
        mask = cast_arrays(masks[(turn + i) % len(masks)](), query.dtype)
        schedule = SCHEDULES[(turn + i) % len(SCHEDULES)]
        assert_matches_reference(
            query, key, value, mask=mask, kernel=kernel, attention=on_metal, schedule=schedule, **options
        )


def on_metal(*args, return_lse, **options):
    result = run(*args, **options)
    return result.out, result.lse


@pytest.mark.parametrize(
    "dims", [(1, 1), (5, 7), (80, 96), (128, 128), (192, 128), (64, 200), (256, 256), (33, 8)], ids=str
)
@pytest.mark.parametrize("kernel", CASES)
def test_head_dims(rng, kernel, dims):
    check_dims(rng, kernel, dims, CASES[kernel][0][5])


@pytest.mark.parametrize("dims", [(512, 512), (300, 20), (16, 400)], ids=str)
@pytest.mark.parametrize("kernel", [name for name in CASES if "prefill" not in name])
def test_head_dims_above_256(rng, kernel, dims):
    check_dims(rng, kernel, dims, CASES[kernel][0][5])


@pytest.mark.parametrize("dims", [(96, 96), (128, 64), (256, 40)], ids=str)
def test_head_dims_of_a_long_prompt(rng, dims):
    check_dims(rng, "metal_prefill_reg", dims, (66, 65))


@pytest.mark.parametrize(("length", "group"), [(8, 33), (3, 100), (8, 8)])
def test_more_rows_than_a_threadgroup_holds(rng, length, group):
    query, key, value = draw(rng, heads=group, kv_heads=1, length=length, key_len=70, dim=64)
    assert_matches_reference(query, key, value, mask="causal", kernel="metal_decode_split", attention=on_metal)


def check_dims(rng, kernel, dims, lengths):
    for dtype in ("float32", "bfloat16"):
        query, key, value = draw(
            rng, heads=4, length=lengths[0], key_len=lengths[1], dim=dims[0], value_dim=dims[1], dtype=dtype
        )
        assert_matches_reference(query, key, value, mask="causal", kernel=kernel, attention=on_metal)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kernel", CASES)
def test_float32_is_within_2e_6_of_float64(rng, kernel, dim):
    for length, key_len in CASES[kernel][0][-4:]:
        query, key, value = draw(rng, heads=2, kv_heads=1, length=length, key_len=key_len, dim=dim)
        result = run(query, key, value, mask="causal", kernel=kernel)
        out, lse = reference_attention(to_numpy(query), to_numpy(key), to_numpy(value), None, "causal")
        np.testing.assert_allclose(to_numpy(result.out), out, rtol=0, atol=2e-6)
        np.testing.assert_allclose(to_numpy(result.lse), lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kernel", CASES)
def test_the_schedule_changes_no_bit(rng, kernel):
    length, key_len = CASES[kernel][0][7]
    query, key, value = draw(rng, heads=7, kv_heads=1, length=length, key_len=key_len, dim=64)
    first = run(query, key, value, mask="causal", kernel=kernel)
    for schedule in SCHEDULES[1:]:
        other = run(query, key, value, mask="causal", kernel=kernel, schedule=schedule)
        assert mx.array_equal(first.out, other.out)
        assert mx.array_equal(first.lse, other.lse)
        assert first.counts == other.counts
