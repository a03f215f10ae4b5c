"""Forward-mode derivatives agree with central differences in float64."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention, quantized_flash_attention

from tests.core.gradient_oracle import draw_call
from tests.core.oracle import assert_within_rule, draw, to_numpy, unfused
from tests.core.test_gradients import with_options
from tests.core.test_grid import mask_kinds, option_kinds
from tests.promises import promise

STEP = 1e-5


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
