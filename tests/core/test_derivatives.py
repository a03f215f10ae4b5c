"""Forward-mode and second derivatives agree with central differences in float64.

Second derivatives are taken in each combination of forward and reverse mode.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention, quantized_flash_attention

from tests.core.gradient_oracle import draw_call
from tests.core.oracle import assert_within_rule, draw, to_numpy, unfused
from tests.core.test_gradients import small_call, with_options
from tests.core.test_grid import mask_kinds, option_kinds
from tests.promises import promise

STEP, STEP_OF_TWO = 1e-5, 3e-4  # of first and of second derivatives


def normal_like(rng, arrays):
    return [mx.array(rng.standard_normal(a.shape)).astype(a.dtype) for a in arrays]


def function_of(call, attention):
    """Returns a function of query, key, value and sinks that makes the call with `attention`."""
    options = {"softcap": call.softcap, "alibi_slopes": call.alibi_slopes}

    def results(query, key, value, sinks=None):
        return attention(query, key, value, call.scale, call.mask, sinks=sinks, **options)

    return results


def with_lse(*args, **options):
    return flash_attention(*args, **options, return_lse=True)


def assert_tangents_obey_the_rule(rng, call):
    primals = [call.query, call.key, call.value] + ([] if call.sinks is None else [call.sinks])
    tangents = normal_like(rng, primals)
    _, got = mx.jvp(function_of(call, with_lse), primals, tangents)
    _, by_unfused = mx.jvp(function_of(call, unfused), primals, tangents)
    points = [to_numpy(a).astype(np.float64) for a in primals]
    steps = [to_numpy(a).astype(np.float64) * STEP for a in tangents]
    ahead, behind = (call.forward_of(*(p + sign * s for p, s in zip(points, steps, strict=True))) for sign in (1, -1))
    for number, name in enumerate(["out", "lse"]):
        with np.errstate(invalid="ignore"):  # a row that sees nothing has -inf - -inf
            expected = np.nan_to_num((ahead[number] - behind[number]) / (2 * STEP), nan=0)
        assert got[number].dtype == (call.query.dtype if name == "out" else mx.float32)
        base = to_numpy(by_unfused[number])
        assert_within_rule(to_numpy(got[number]), expected, [lambda base=base: np.nan_to_num(base)], name)


@promise("mx.jvp works with every mask and option")
@pytest.mark.rotate(7)
@pytest.mark.parametrize("mask_turn", range(12))
@pytest.mark.parametrize("option_turn", range(8))
def test_of_out_and_lse(rng, mask_turn, option_turn):
    for length, key_len in [(5, 7), (1, 33), (40, 33)]:
        call = draw_call(rng, batch=(2,), heads=4, kv_heads=2, length=length, key_len=key_len, value_dim=24)
        call = with_options(call, mask_kinds(rng, length, key_len)[mask_turn](), option_kinds(rng, 4)[option_turn])
        assert_tangents_obey_the_rule(rng, call)


def test_quantised_keys_and_values(rng):
    query, key, value = draw(rng, heads=4, kv_heads=2, length=5, key_len=7, dim=64)
    packed = [mx.quantize(x, 32, 4) for x in (key, value)]
    plain = [mx.dequantize(*x, group_size=32, bits=4) for x in packed]
    (tangent,) = normal_like(rng, [query])
    quantised = lambda q: quantized_flash_attention(q, *packed, bits=4, group_size=32, mask="causal")  # noqa: E731
    _, (got,) = mx.jvp(quantised, [query], [tangent])
    _, (expected,) = mx.jvp(lambda q: flash_attention(q, *plain, mask="causal"), [query], [tangent])
    assert mx.allclose(got, expected, atol=1e-5)


def test_hidden_nan_reaches_nothing(rng):
    """NaN in keys that no query sees, and in queries that see nothing, must change no tangent."""
    query, key, value = draw(rng, length=9, key_len=12)
    shown = (mx.arange(9)[:, None] > 2) & (mx.arange(12) > 3)
    broken = [mx.where((mx.arange(a.shape[-2]) < 3)[:, None], mx.nan, a) for a in (query, key, value)]
    tangents = normal_like(rng, broken)
    attend = lambda q, k, v: with_lse(q, k, v, mask=shown, sinks=mx.array([1e4, -1e4]))  # noqa: E731
    got, expected = mx.jvp(attend, broken, tangents)[1], mx.jvp(attend, [query, key, value], tangents)[1]
    assert mx.array_equal(got[0], expected[0])
    assert mx.array_equal(got[1], expected[1])
    assert not got[0][..., :3, :].any()


def test_scores_far_beyond_the_softcap():
    query, key = mx.full((1, 1, 1, 1), 1e5), mx.array([1.0, 2.0]).reshape(1, 1, 2, 1)
    tangents = mx.jvp(lambda q: flash_attention(q, key, key, 1e32, softcap=1e-3), [query], [query])[1]
    assert tangents[0].item() == 0


# --- Second derivatives --------------------------------------------------------------------------------------


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
    call, primals, exact_loss = small_call(rng, mask_turn, option_turn)
    tangents = normal_like(rng, primals)

    def loss(*inputs):
        out, lse = function_of(call, with_lse)(*inputs)
        return (out * call.dout).sum() + mx.where(mx.isneginf(lse), 0, lse * call.dlse).sum()

    points = [to_numpy(a).astype(np.float64) for a in primals]
    steps = [to_numpy(a).astype(np.float64) * STEP_OF_TWO for a in tangents]
    results = [order(loss, primals, tangents) for order in ORDERS]
    for position, point in enumerate(points):
        expected = np.zeros(point.shape)
        for index in np.ndindex(point.shape):
            for sign, other in itertools.product((1, -1), repeat=2):
                moved = [p + other * s for p, s in zip(points, steps, strict=True)]
                moved[position][index] += sign * STEP_OF_TWO
                expected[index] += sign * other * exact_loss(moved) / (4 * STEP_OF_TWO**2)
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
