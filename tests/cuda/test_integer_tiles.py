"""For 16-bit queries and quantised keys, kernels give the float32 result, rounded to 16 bits.

The tests run the kernels on the CPU, and on a GPU if there is one.
"""

import functools

import flashattn_core
import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.check.compare import ERROR, difference
from flashattn_core.masks import KeyRange
from flashattn_core.reference import reference_attention

from tests.core.oracle import to_numpy
from tests.core.test_grid import in_dtype, mask_kinds, option_kinds
from tests.core.test_quantised import GROUP_SIZES, VIEWS, dequantised, normal, quantised
from tests.cuda.cuda_attention import flash_attention
from tests.metal.planted_faults import replacing
from tests.promises import promise

pytestmark = pytest.mark.rotate(15)

# Kernel, queries, query heads per key head. "step" has 7 rows (1 query of 7 heads). "steps" has 35 rows, which are
# divided into blocks of 16. "prefill" has full blocks and a block that is not full.
STEPS = {"step": ("cuda_decode", 1, 7), "steps": ("cuda_decode", 5, 7)}
CALLS = STEPS | {"prefill": ("cuda_prefill", 70, 2), "hopper": ("cuda_prefill_hopper", 70, 2)}
calls = pytest.mark.parametrize(("kernel", "length", "group"), CALLS.values(), ids=CALLS)
dtypes = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
each_bits = pytest.mark.parametrize("bits", [3, 4, 8])


def on_gpu(*arguments, kernel, **options):
    return flashattn_core.quantized_flash_attention(*arguments, kernel=kernel.removesuffix("_hopper"), **options)


@pytest.fixture(params=["in the harness", "on a GPU"])
def attention(request):
    if request.param == "on a GPU":
        request.getfixturevalue("requires_gpu")
        return on_gpu
    request.getfixturevalue("requires_clang")
    return flash_attention


def in_float32(query, key, value, scale=None, mask=None, *, how, **options):
    """`out` and `lse` that the reference computes with dequantised keys and values."""
    in_numpy = {name: to_numpy(x) if isinstance(x, mx.array) else x for name, x in options.items()}
    floats = (to_numpy(dequantised(x, **how)) for x in (key, value))
    return reference_attention(to_numpy(query), *floats, scale, mask, **in_numpy)


def assert_is(found, expected):
    assert difference(found, mx.array(expected.astype(np.float32)), ERROR) == ""


def assert_is_float32s(attention, *arguments, kernel, how, **options):
    found = attention(*arguments, kernel=kernel, return_lse=True, **how, **options)
    for got, expected in zip(found, in_float32(*arguments, how=how, **options), strict=True):
        assert_is(got, expected)


@promise("on CUDA 4- and 8-bit keys with 16-bit queries give float32's result, rounded")
@calls
@dtypes
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@each_bits
@pytest.mark.parametrize("turn", range(7))
def test_is_float32s(rng, attention, kernel, length, group, dtype, group_size, bits, turn):
    how, key_len = {"group_size": group_size, "bits": bits}, (33, 150, 577)[turn % 3]
    group_dtype = (dtype, dtype, mx.float32)[turn % 3]
    dim, value_dim = (128, 128) if turn % 2 else (group_size, 128 if group_size < 128 else 256)
    key, value = (quantised(rng, 2, 2, key_len, columns, dtype=group_dtype, **how) for columns in (dim, value_dim))
    mask, options = mask_kinds(rng, length, key_len)[turn](), option_kinds(rng, 2 * group)[turn]
    given = in_dtype(dtype, mask, options)
    query = normal(rng, 2, 2 * group, length, dim, dtype=dtype)
    assert_is_float32s(attention, query, key, value, None, given.pop("mask"), how=how, kernel=kernel, **given)


# Queries that cannot be copied 16 bytes at a time: (number of columns, the slice of these columns that is the query).
APART, MISALIGNED = (192, slice(0, None, 2)), (97, slice(1, None))


@calls
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("queries", [APART, MISALIGNED], ids=["apart", "misaligned"])
def test_strides(rng, attention, queries, view, kernel, length, group):
    (columns, own), how = queries, {"group_size": 32, "bits": 8}
    key, value = (tuple(view(x) for x in quantised(rng, 2, 2, 70, 96, dtype=mx.bfloat16, **how)) for _ in range(2))
    query = normal(rng, 2, 2 * group, length, columns, dtype=mx.bfloat16)[..., own]
    assert_is_float32s(attention, query, key, value, None, "causal", how=how, kernel=kernel)


@pytest.mark.parametrize(("kernel", "length", "group"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("key_len", [256, 333])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_caches_of_mlx_lm_are_copied_by_16_bytes(requires_clang, rng, group_size, key_len, kernel, length, group):
    """Kernels must copy mlx-lm's caches 16 bytes at a time, even if each row has only one scale.

    This test removes the code that copies smaller pieces.
    """
    how = {"group_size": group_size, "bits": 4}
    cache = [quantised(rng, 1, 2, 512, group_size, dtype=mx.bfloat16, **how) for _ in range(2)]
    key, value = (tuple(x[..., :key_len, :] for x in each) for each in cache)
    attention = functools.partial(flash_attention, edit=replacing("load_rows<false>(n, first, end - first);"))
    query = normal(rng, 1, 2 * group, length, group_size, dtype=mx.bfloat16)
    assert_is_float32s(attention, query, key, value, None, "causal", how=how, kernel=kernel)


@calls
@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_scales_reach_nothing(rng, attention, bad, dtype, kernel, length, group):
    how = {"group_size": 64, "bits": 8}
    query, packed = normal(rng, 1, 2 * group, length, 64, dtype=dtype), quantised(rng, 1, 2, 400, 64)
    visible = (mx.arange(400) >= 7) & (mx.arange(400) < 390)
    spoilt = tuple(x if x.dtype == mx.uint32 else mx.where(visible[:, None], x, bad) for x in packed)
    for mask in (KeyRange(7, 390), visible):
        out = attention(query, spoilt, spoilt, None, mask, kernel=kernel, **how)
        assert_is(out, in_float32(query, packed, packed, None, mask, how=how)[0])


@calls
@dtypes
@each_bits
@pytest.mark.parametrize("size", [2**-8, 2**8])
def test_values_of_other_sizes(rng, attention, size, bits, dtype, kernel, length, group):
    """Multiplying the values by a power of two must multiply `out` by the same power.

    A probability times a quantisation scale may then leave float16's range.
    """
    how = {"group_size": 64, "bits": bits}
    key, value = (quantised(rng, 1, 2, 300, 64, **how) for _ in range(2))
    value = (value[0], value[1] * size, value[2] * size)
    query = normal(rng, 1, 2 * group, length, 64, dtype=dtype)
    out = attention(query, key, value, None, "causal", kernel=kernel, **how)
    assert_is(out / size, in_float32(query, key, value, None, "causal", how=how)[0] / size)


@calls
@each_bits
def test_numbers_of_any_size(rng, attention, bits, kernel, length, group):
    """Very large and very small queries and scales, and large values, must give right results without overflow."""
    how = {"group_size": 64, "bits": bits}
    query = normal(rng, 1, 2 * group, length, 64, dtype=mx.bfloat16)
    key, value = (quantised(rng, 1, 2, 600, 64, **how) for _ in range(2))
    assert_is_float32s(attention, query * 4e19, key, value, 2e-21, how=how, kernel=kernel)
    assert_is_float32s(attention, query * 1e-19, key, value, 1e18, how=how, kernel=kernel)
    large = (value[0], value[1] * 1e16, value[2] * 1e16 + 8e16)
    out = attention(query * 0, key, large, None, kernel=kernel, **how)
    expected = to_numpy(dequantised(large, **how)).mean(-2, keepdims=True).repeat(group, 1).repeat(length, 2)
    assert_is(out / 2**57, expected / 2**57)
