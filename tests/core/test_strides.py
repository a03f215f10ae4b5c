"""Inputs may have any strides. Key and value are not copied, nor is the output when a model joins its heads."""

import mlx.core as mx
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal

from tests.core.gradient_oracle import assert_both_ways
from tests.core.oracle import DTYPES, draw
from tests.memory import peak_beyond
from tests.promises import promise

LENGTHS = [(1, 33), (8, 65), (33, 97), (97, 33)]


def transposed(a):
    """The array (B, H, L, D), stored as (B, L, H, D). A model's projections make such arrays."""
    return mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def cache_slice(a):
    """A view of `a` in a larger buffer. mlx-lm's KV cache returns such views."""
    buffer = mx.full((*a.shape[:2], a.shape[2] + 31, a.shape[3]), mx.nan, a.dtype)
    buffer[:, :, : a.shape[2]] = a
    return buffer[:, :, : a.shape[2]]


def strided_columns(a):
    return mx.repeat(a, 3, axis=-1)[..., ::3]


def reversed_rows(a):
    return mx.contiguous(a[:, :, ::-1])[:, :, ::-1]


def column_major(a):
    return mx.contiguous(a.swapaxes(-1, -2)).swapaxes(-1, -2)


@pytest.mark.parametrize(("length", "key_len"), LENGTHS)
@pytest.mark.parametrize("layout", [transposed, cache_slice, strided_columns, reversed_rows, column_major])
def test_strided_inputs(rng, layout, length, key_len):
    arrays = draw(rng, batch=(2,), heads=4, length=length, key_len=key_len, dim=24, value_dim=40)
    query, key, value = (layout(a) for a in arrays)
    mx.eval(query, key, value)
    assert_both_ways(query, key, value, mask="causal")
    assert mx.array_equal(flash_attention(query, key, value, mask="causal"), flash_attention(*arrays, mask="causal"))


@pytest.mark.parametrize(("length", "key_len"), LENGTHS)
def test_broadcast_inputs(rng, length, key_len):
    query, key, value = draw(rng, batch=(1,), heads=2, length=length, key_len=key_len)
    key, value = (mx.broadcast_to(a[:, :1], (3, 2, *a.shape[2:])) for a in (key, value))
    query = mx.broadcast_to(query, (3, *query.shape[1:]))
    assert_both_ways(query, key, value)


@promise("any strides work without a copy of keys and values")
@pytest.mark.parametrize("layout", [transposed, cache_slice, strided_columns, column_major])
@pytest.mark.parametrize("length", [1, 128])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_nothing_but_the_outputs_is_allocated(layout, length, dtype):
    query = mx.zeros((1, 4, length, 64), dtype)
    key, value = (layout(mx.ones((1, 4, 2048, 64))).astype(dtype) for _ in range(2))
    mask = mx.broadcast_to(mx.arange(2048) < 2000, (1, 4, length, 2048))
    mx.eval(query, key, value, mask)
    outputs = query.nbytes + 4 * length * 3 * 4  # out, and float32 lse, maximum and sum for the rows of 4 heads
    peak = peak_beyond(lambda: flash_attention(query, key, value, mask=mask).swapaxes(1, 2).flatten(2))
    assert peak <= outputs + 3 * 16384  # each of three buffers is rounded up to pages


def in_the_middle_of_an_element(a):
    """A view that has the numbers of `a` and begins at an odd address."""
    data = mx.contiguous(a).view(mx.uint8).flatten()
    return mx.concatenate([mx.zeros(1, mx.uint8), data])[1:].view(a.dtype).reshape(a.shape)


def with_unaligned_views(rng, length, dtype):
    """Returns a function that calls flash_attention, its arguments, and copies of these arguments at odd addresses."""
    arrays = draw(rng, heads=4, length=length, key_len=70, dim=24, dtype=dtype)
    arrays += tuple(mx.array(rng.standard_normal(shape)).astype(DTYPES[dtype]) for shape in ((length, 70), 4))

    def attend(query, key, value, bias, sinks):
        return flash_attention(query, key, value, mask=Causal() & bias, sinks=sinks)

    return attend, arrays, [in_the_middle_of_an_element(a) for a in arrays]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [5, 19])
def test_views_that_begin_in_the_middle_of_an_element(rng, length, dtype):
    attend, arrays, views = with_unaligned_views(rng, length, dtype)
    assert mx.array_equal(attend(*views), attend(*arrays))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_copies_views_that_begin_in_the_middle_of_an_element(rng, dtype):
    """The CPU backend must copy these views, because unaligned reads are undefined behaviour in C++."""
    attend, arrays, views = with_unaligned_views(rng, 19, dtype)
    mx.eval(arrays, views)
    of_views, of_arrays = (peak_beyond(lambda given=given: attend(*given)) for given in (views, arrays))
    assert of_views - of_arrays >= sum(view.nbytes for view in views[:3])  # query, key and value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [5, 19])
def test_gradients_of_views_that_begin_in_the_middle_of_an_element(rng, length, dtype):
    attend, arrays, views = with_unaligned_views(rng, length, dtype)

    def gradients(query, key, value, *rest):
        return mx.vjp(lambda *qkv: attend(*qkv, *rest), [query, key, value], [query])[1]

    for got, expected in zip(gradients(*views), gradients(*arrays), strict=True):
        assert mx.array_equal(got, expected)
