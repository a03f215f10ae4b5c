"""Second derivatives agree with central differences in float64, for each combination of forward and reverse mode."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention

from tests.core.gradient_oracle import draw_call
from tests.core.oracle import draw, to_numpy
from tests.core.test_gradients import with_options
from tests.core.test_grid import mask_kinds, option_kinds
from tests.core.test_jvp import function_of, normal_like, with_lse
from tests.promises import promise

STEP = 3e-4


def inner(arrays, others):
    return sum((a * b).sum() for a, b in zip(arrays, others, strict=True))


def reverse_over_reverse(loss, primals, tangents):
    everything = tuple(range(len(primals)))
    return mx.grad(lambda *x: inner(mx.grad(loss, everything)(*x), tangents), everything)(*primals)


def forward_over_reverse(loss, primals, tangents):
    return mx.jvp(mx.grad(loss, tuple(range(len(primals)))), primals, tangents)[1]


def reverse_over_forward(loss, primals, tangents):
    along = lambda *x: mx.jvp(loss, list(x), tangents)[1][0]  # noqa: E731
    return mx.grad(along, tuple(range(len(primals))))(*primals)


ORDERS = [reverse_over_reverse, forward_over_reverse, reverse_over_forward]


@promise("second derivatives work in every order, with every mask and option")
@pytest.mark.rotate(7)
@pytest.mark.parametrize("mask_turn", range(12))
@pytest.mark.parametrize("option_turn", range(8))
def test_hessian_times_vector(rng, mask_turn, option_turn):
    """The Hessian of sum(out * dout) + sum(lse * dlse), times tangents, must agree with finite differences."""
    call = draw_call(rng, batch=(2,), heads=2, kv_heads=1, length=5, key_len=7, dim=3, value_dim=2)
    call = with_options(call, mask_kinds(rng, 5, 7)[mask_turn](), option_kinds(rng, 2)[option_turn])
    primals = [call.query, call.key, call.value] + ([] if call.sinks is None else [call.sinks])
    tangents = normal_like(rng, primals)

    def loss(*inputs):
        out, lse = function_of(call, with_lse)(*inputs)
        return (out * call.dout).sum() + mx.where(mx.isneginf(lse), 0, lse * call.dlse).sum()

    def exact_loss(arrays):
        out, lse = call.forward_of(*arrays)
        seen = np.where(lse == -np.inf, 0, lse)
        return (out * to_numpy(call.dout)).sum() + (seen * to_numpy(call.dlse)).sum()

    points = [to_numpy(a).astype(np.float64) for a in primals]
    steps = [to_numpy(a).astype(np.float64) * STEP for a in tangents]
    results = [order(loss, primals, tangents) for order in ORDERS]
    for position, point in enumerate(points):
        expected = np.zeros(point.shape)
        for index in np.ndindex(point.shape):
            for sign, other in itertools.product((1, -1), repeat=2):
                moved = [p + other * s for p, s in zip(points, steps, strict=True)]
                moved[position][index] += sign * STEP
                expected[index] += sign * other * exact_loss(moved) / (4 * STEP**2)
        for result in results:
            np.testing.assert_allclose(to_numpy(result[position]), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("transform", [mx.compile, mx.vmap, mx.checkpoint])
def test_under_other_transforms(rng, order, transform):
    primals = draw(rng, batch=(3, 2), heads=4, kv_heads=2, length=5, key_len=7)
    tangents = normal_like(rng, primals)
    loss = lambda *x: flash_attention(*x, mask="causal", sinks=mx.array([1.0, 0.0, 2.0, -1.0])).square().sum()  # noqa: E731
    second = lambda *given: order(loss, list(given[:3]), list(given[3:]))  # noqa: E731
    got, expected = transform(second)(*primals, *tangents), second(*primals, *tangents)
    for a, b in zip(got, expected, strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_scores_far_beyond_the_soft_cap(rng, order):
    """At such scores MLX's second derivative of tanh is NaN. The second derivative of attention must be finite."""
    primals = [100 * a for a in draw(rng, length=5, key_len=7)]
    loss = lambda *x: flash_attention(*x, softcap=2.0).square().sum()  # noqa: E731
    of_query, of_key, of_value = order(loss, primals, normal_like(rng, primals))
    assert of_query.abs().max() < 1e-3
    assert of_key.abs().max() < 1e-3
    assert 0.1 < of_value.abs().max() < 10
