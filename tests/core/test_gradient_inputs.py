"""Gradients of inputs in any memory, batch and head layout, under arrays of any shape: as the forward takes them."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.masks import Causal, KeyRange
from gradient_oracle import assert_obeys_the_rule, draw_call, flash_gradients
from oracle import DTYPES
from test_array_masks import SHAPES
from test_strides import cache_slice, column_major, reversed_rows, strided_columns, transposed

LENGTHS = [(1, 33), (33, 97), (97, 33)]


def assert_same_bits(call, other):
    got, expected = flash_gradients(call), flash_gradients(other)
    assert all(mx.array_equal(getattr(got, name), getattr(expected, name)) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize(("length", "key_len"), LENGTHS)
@pytest.mark.parametrize("layout", [transposed, cache_slice, strided_columns, reversed_rows, column_major])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided(rng, dtype, layout, length, key_len):
    dense = draw_call(
        rng, batch=(2,), heads=4, length=length, key_len=key_len, dim=24, value_dim=40, dtype=dtype
    )  # fmt: skip
    dense = replace(dense, mask="causal")
    views = {name: layout(getattr(dense, name)) for name in ("query", "key", "value", "dout")}
    call = replace(dense, dlse=layout(dense.dlse[..., None])[..., 0], **views)
    mx.eval(call.dlse, *views.values())
    assert_obeys_the_rule(call)
    assert_same_bits(call, dense)


@pytest.mark.parametrize(("length", "key_len"), LENGTHS)
def test_broadcast(rng, length, key_len):
    """Of a broadcast view: each element has a gradient of its own."""
    call = draw_call(rng, batch=(3,), length=length, key_len=key_len)
    views = {name: mx.broadcast_to(getattr(call, name)[:1, :1], getattr(call, name).shape) for name in ("key", "value")}
    views["query"] = mx.broadcast_to(call.query[:1], call.query.shape)
    assert_obeys_the_rule(replace(call, **views))
    assert_same_bits(replace(call, **views), replace(call, **{name: mx.contiguous(a) for name, a in views.items()}))


def test_a_broadcast_gradient(rng):
    """As sum(out) makes it: every stride is 0."""
    call = draw_call(rng, batch=(2,), length=33, key_len=40)
    ones = replace(call, dout=mx.ones(call.dout.shape), dlse=mx.ones(call.dlse.shape))
    one = mx.array(1.0)
    broadcast = replace(ones, dout=mx.broadcast_to(one, ones.dout.shape), dlse=mx.broadcast_to(one, ones.dlse.shape))
    assert_obeys_the_rule(broadcast)
    assert_same_bits(broadcast, ones)


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (2, 1, 2), (2, 1, 2, 1, 2, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("length", [1, 33])
def test_leading_dimensions(rng, batch, length):
    call = draw_call(rng, batch=batch, heads=4, kv_heads=2, length=length, key_len=65)
    assert_obeys_the_rule(replace(call, mask="causal", sinks=mx.array([0.5, -3.0, 2.0, 1.0])))


def test_leading_dimensions_that_cannot_be_flattened(rng):
    call = draw_call(rng, batch=(4, 3), heads=4, kv_heads=2, length=33, key_len=65)
    names = ("query", "key", "value", "dout", "dlse")
    assert_obeys_the_rule(replace(call, **{name: getattr(call, name).swapaxes(0, 1)[:, ::2] for name in names}))


def test_masks_follow_the_batch(rng):
    call = draw_call(rng, batch=(2, 3), length=9, key_len=65)
    start = mx.array([[0, 1, 2], [40, 50, 60]])
    array = mx.array(rng.random((3, 1, 9, 65)) > 0.3)
    assert_obeys_the_rule(replace(call, mask=Causal() & KeyRange(start, 64) & array))


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 3), (14, 2), (28, 4), (7, 1), (71, 1)], ids=str)
@pytest.mark.parametrize(("length", "key_len"), [(1, 1030), (13, 65), (97, 97)])
def test_groups(rng, heads, length, key_len):
    call = draw_call(rng, heads=heads[0], kv_heads=heads[1], length=length, key_len=key_len)
    assert_obeys_the_rule(replace(call, mask="causal"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_arrays_that_broadcast(rng, kind, shape):
    call = draw_call(rng, batch=(2,), heads=4, length=33, key_len=70)
    mask = mx.array(rng.random(shape) > 0.3 if kind == "bool" else rng.standard_normal(shape).astype(np.float32))
    assert_obeys_the_rule(replace(call, mask=mask))


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("length", [1, 33])
def test_strided_arrays(rng, kind, length):
    call = draw_call(rng, batch=(2,), heads=4, length=length, key_len=70)
    whole = rng.standard_normal((140, 2, length, 8)).astype(np.float32)
    whole = mx.array(whole > 0.3 if kind == "bool" else whole)
    assert_obeys_the_rule(replace(call, mask=whole[::-2, :, :, ::2].transpose(1, 3, 2, 0)))
