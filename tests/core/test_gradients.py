"""Gradients of query, key, value and sinks agree with float64.

Most masks, options and shapes are tested elsewhere, by assert_both_ways(). These tests concern gradients alone.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, SlidingWindow

from tests.core.gradient_oracle import (
    Call,
    assert_equal_weights,
    assert_obeys_the_rule,
    draw_call,
    flash_gradients,
    unfused_gradients,
)
from tests.core.oracle import DTYPES, draw, to_numpy
from tests.core.test_grid import in_dtype, mask_kinds, option_kinds
from tests.core.test_strides import cache_slice, column_major, reversed_rows, strided_columns, transposed
from tests.promises import promise


def with_options(call: Call, mask, options) -> Call:
    """The call with a mask and options of test_grid.py. Sinks and additive masks are cast to query's dtype."""
    return replace(call, **in_dtype(call.query.dtype, mask, options))


def test_sinks_gradient_is_a_sum_over_many_rows(rng):
    """A gradient that is summed row by row in float32 would be off by 4e-5, twice what is allowed."""
    assert_obeys_the_rule(replace(draw_call(rng, length=8192, key_len=3, dim=4), sinks=mx.array([0.5, -0.5])))


def assert_equal(got, expected):
    assert all(mx.array_equal(a, b) for a, b in zip(got, expected, strict=True))


def assert_same_bits(call, other):
    got, expected = flash_gradients(call), flash_gradients(other)
    assert_equal([got.dq, got.dk, got.dv], [expected.dq, expected.dk, expected.dv])


@promise("16-bit gradients equal float32 gradients rounded once")
@pytest.mark.parametrize(("length", "key_len"), [(1, 700), (8, 33), (70, 97)])
@pytest.mark.parametrize("scale", [0.2, 5.0])  # with 5.0, one key has nearly all of a row's weight
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_are_those_of_float32_rounded_once(rng, dtype, scale, length, key_len):
    sizes = {"heads": 6, "kv_heads": 2, "length": length, "key_len": key_len, "dim": 24, "value_dim": 40}
    call = replace(draw_call(rng, **sizes, dtype=dtype), scale=scale)
    call = replace(call, sinks=mx.array(rng.standard_normal(6, dtype=np.float32)).astype(call.query.dtype))
    for mask in (None, "causal", SlidingWindow(20)):
        names = ("query", "key", "value", "dout", "sinks")
        wide = {name: getattr(call, name).astype(mx.float32) for name in names}
        got, expected = (flash_gradients(replace(each, mask=mask)) for each in (call, replace(call, **wide)))
        for name in ("dq", "dk", "dv", "dsinks"):
            assert mx.array_equal(getattr(got, name), getattr(expected, name).astype(call.query.dtype)), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_in_which_one_key_has_nearly_all_of_the_weight(dtype):
    """The gradient is -exp(-7) = -0.00091. If delta came from the rounded out, dq would be 6 or 100 times as large."""
    query, key, value = (
        mx.array(numbers, DTYPES[dtype]).reshape(1, 1, -1, 1) for numbers in ([-7.0], [100.0, 101.0], [1.0, 0.0])
    )
    dq = mx.grad(lambda query: flash_attention(query, key, value, 1.0).sum())(query)
    assert dq.item() == pytest.approx(-np.exp(-7) / (1 + np.exp(-7)) ** 2, rel=0.01)


@pytest.mark.rotate(4)
@pytest.mark.parametrize(("length", "key_len"), [(1, 33), (33, 97), (97, 33)])
@pytest.mark.parametrize("layout", [transposed, cache_slice, strided_columns, reversed_rows, column_major])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided(rng, dtype, layout, length, key_len):
    dense = draw_call(rng, batch=(2,), heads=4, length=length, key_len=key_len, dim=24, value_dim=40, dtype=dtype)
    dense = replace(dense, mask="causal")
    views = {name: layout(getattr(dense, name)) for name in ("query", "key", "value", "dout")}
    call = replace(dense, dlse=layout(dense.dlse[..., None])[..., 0], **views)
    mx.eval(call.dlse, *views.values())
    assert_obeys_the_rule(call)
    assert_same_bits(call, dense)


def small_call(rng, mask_turn, option_turn):
    """Returns a call, its inputs, and a function of these: sum(out * dout) + sum(lse * dlse) in float64."""
    call = draw_call(rng, batch=(2,), heads=2, kv_heads=1, length=5, key_len=7, dim=3, value_dim=2)
    call = with_options(call, mask_kinds(rng, 5, 7)[mask_turn](), option_kinds(rng, 2)[option_turn])
    dout, dlse = to_numpy(call.dout).astype(np.float64), to_numpy(call.dlse).astype(np.float64)

    def loss(arrays):
        out, lse = call.forward_of(*arrays)
        return (out * dout).sum() + np.where(lse == -np.inf, 0, lse * dlse).sum()

    return call, [call.query, call.key, call.value] + ([] if call.sinks is None else [call.sinks]), loss


@promise("gradients of query, key, value and sinks agree with finite differences")
@pytest.mark.rotate(7)
@pytest.mark.parametrize("mask_turn", range(12))
@pytest.mark.parametrize("option_turn", range(8))
def test_by_finite_differences(rng, mask_turn, option_turn):
    """Reference and kernel must agree with central differences of the loss."""
    call, primals, loss = small_call(rng, mask_turn, option_turn)
    inputs = [to_numpy(a).astype(np.float64) for a in primals]
    formulas, kernel = unfused_gradients(call), flash_gradients(call)
    step = 1e-5
    for position, name in enumerate(("dq", "dk", "dv", "dsinks")[: len(inputs)]):
        slopes = np.empty(inputs[position].shape)
        for index in np.ndindex(slopes.shape):
            moved = [[a.copy() for a in inputs] for _ in range(2)]
            moved[0][position][index] += step
            moved[1][position][index] -= step
            slopes[index] = (loss(moved[0]) - loss(moved[1])) / (2 * step)
        np.testing.assert_allclose(getattr(formulas, name), slopes, rtol=0, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(to_numpy(getattr(kernel, name)), slopes, rtol=0, atol=1e-5, err_msg=name)


@promise("rows that see nothing have zero gradients")
@pytest.mark.parametrize("mask", [KeyRange(5, 5), mx.array(False), KeyRange(0, 10) & KeyRange(20)], ids=str)
@pytest.mark.parametrize("length", [1, 70])
def test_rows_that_see_nothing_have_zero_gradients(rng, mask, length):
    got = flash_gradients(replace(draw_call(rng, length=length, key_len=64), mask=mask, sinks=mx.array([1.0, 2.0])))
    for gradient in (got.dq, got.dk, got.dv, got.dsinks):
        assert (gradient == 0).all()


@pytest.mark.parametrize(("length", "key_len"), [(5, 0), (0, 5), (0, 0)])
def test_empty(rng, length, key_len):
    call = draw_call(rng, length=length, key_len=key_len, dim=8, value_dim=6)
    got = flash_gradients(call)
    for gradient, array in ((got.dq, call.query), (got.dk, call.key), (got.dv, call.value)):
        assert gradient.shape == array.shape
        assert (gradient == 0).all()


@pytest.mark.rotate(5)
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
class TestAdversarial:
    @pytest.mark.parametrize("scale", [250.0, -250.0])
    def test_scores_of_a_thousand(self, rng, dtype, mask, scale):
        call = replace(draw_call(rng, length=64, key_len=97, dtype=dtype), scale=scale, mask=mask)
        assert np.abs(call.forward()[1]).max() > 1000
        assert_obeys_the_rule(call)

    def test_one_dominating_key(self, rng, dtype, mask):
        call = draw_call(rng, length=65, key_len=300, dim=32, dtype=dtype)
        key = call.key * mx.where((mx.arange(300) == 7)[:, None], 100, 1)
        assert_obeys_the_rule(replace(call, key=key.astype(call.key.dtype), mask=mask))

    @promise("no gradient overflows, however low or high lse is")
    @pytest.mark.parametrize("sign", [-1, 1])
    def test_lse_beyond_what_exp_can_take(self, rng, dtype, mask, sign):
        # All scores are around -120 or 120. In float32 exp(-lse) overflows where lse < -88.7.
        call = draw_call(rng, length=192, key_len=192, dim=32, dtype=dtype)
        query, key = mx.abs(call.query) + 0.5, mx.abs(call.key) + 0.5
        call = replace(call, query=sign * query, key=key, scale=4.0, mask=mask)
        lse = call.forward()[1]
        assert (sign * lse > 88.7).mean() > 0.9
        assert_obeys_the_rule(call)

    @pytest.mark.parametrize("shift", [-1000.0, 300.0])
    def test_far_from_zero_by_an_additive_mask(self, rng, dtype, mask, shift):
        call = draw_call(rng, length=192, key_len=192, dim=32, dtype=dtype)
        shifted = mx.full((192, 192), shift, call.query.dtype)
        assert_obeys_the_rule(replace(call, mask=Causal() & shifted if mask else shifted))


@promise("a sink's gradient is exact beside logits of any size")
@pytest.mark.rotate(1, default=3)
@pytest.mark.parametrize("offset", [20.0, 60.0, -750.0])
def test_sinks_beside_logits_with_an_offset(rng, offset):
    """`offset` is added to all logits and to one sink. The other sink is far above or far below all logits."""
    call = draw_call(rng, length=512, key_len=512, dim=64)
    query = mx.concatenate([call.query, mx.ones((1, 2, 512, 1))], axis=-1)
    key = mx.concatenate([call.key, mx.full((1, 2, 512, 1), offset * 8)], axis=-1)
    for other in (2 * offset, -offset):
        sinks = mx.array([offset + 2, other])
        assert_obeys_the_rule(replace(call, query=query, key=key, scale=0.125, mask="causal", sinks=sinks))


@pytest.mark.parametrize("kernel", ["cpu_prefill", "cpu_decode"])
@pytest.mark.parametrize("length", [1, 8])
def test_scores_are_rounded_as_by_the_forward_kernel(rng, length, kernel):
    """A row's weights must add up to 1 in the backward pass. So both passes must round a score in the same way."""
    query, key, value = draw(rng, heads=28, kv_heads=14, length=length, key_len=40, dim=128)
    key = key * mx.where((mx.arange(40) == 7)[:, None], 1000, 1)

    def attend(value):
        return flash_attention(query, key, value, scale=1.0, kernel=kernel)

    _, (dv,) = mx.vjp(attend, [value], [mx.ones(query.shape)])
    np.testing.assert_allclose(to_numpy(dv).sum(axis=-2), 2 * length, atol=1e-3)


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -1e30, -1e9])
@pytest.mark.parametrize("length", [1, 8, 33])
def test_rows_that_see_only_keys_with_the_lowest_float_added(rng, length, lowest):
    call = draw_call(rng, length=length, key_len=65, dlse=False)
    call = replace(call, mask=mx.full((length, 65), float(lowest)))
    assert_equal_weights(call, flash_gradients(call))
