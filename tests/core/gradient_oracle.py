"""Compares gradients with float64, by the rule of oracle.py.

The error against float64 may be at most twice the error of the unfused gradient, plus 1e-5. The float64 gradient is
computed from the inputs alone. The unfused gradient computes each step in float32, keeps all scores in memory, and
rounds the gradients to the call's dtype. Only with `rounds_out` it takes delta from `out` in the call's dtype, as
kernels may do that run with precision="input".

If a gradient has few numbers, as for two sinks, its unfused error may be small by luck. So the unfused gradient is
computed 2 * ORDERS times, and the largest error counts. Sums are taken in ORDERS orders. For each order, out and lse
are computed once in float32 and once in float64. rounded_away() gives each gradient its largest rounding error.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np
from flashattn_core import flash_attention
from flashattn_core.masks import lower
from flashattn_core.reference import distance, per_head, reference_attention, visible_and_bias

from tests.core.oracle import assert_matches_reference, assert_within_rule, draw, to_numpy

ORDERS = 8  # the number of orders in which the unfused gradient takes its sums


@dataclass(frozen=True)
class Call:
    """One call, and the cotangents of its results."""

    query: mx.array
    key: mx.array
    value: mx.array
    dout: mx.array
    dlse: mx.array | None = None
    scale: float | None = None
    mask: object = None
    softcap: float | None = None
    sinks: mx.array | None = None
    alibi_slopes: mx.array | None = None

    def forward(self) -> tuple[np.ndarray, np.ndarray]:
        """out and lse in float64."""
        return self.forward_of(*map(to_numpy, (self.query, self.key, self.value)))

    def forward_of(self, query, key, value, sinks=None) -> tuple[np.ndarray, np.ndarray]:
        """forward() with these arrays in place of the call's own."""
        numbers = lambda a: None if a is None else to_numpy(a)  # noqa: E731
        sinks = numbers(self.sinks) if sinks is None else sinks
        slopes = numbers(self.alibi_slopes)
        return reference_attention(
            query, key, value, self.scale, self.mask, softcap=self.softcap, sinks=sinks, alibi_slopes=slopes
        )


@dataclass(frozen=True)
class Gradients:
    """The gradients of one call, as MLX or numpy arrays."""

    dq: Any
    dk: Any
    dv: Any
    dsinks: Any = None  # None: the call has no sinks
    dslopes: Any = None  # None: the call has no slopes, or their gradient is not computed
    dbias: Any = None  # None: the call has no additive mask, or the mask's gradient is not computed


def draw_call(rng: np.random.Generator, *, dlse: bool = True, **shapes) -> Call:
    return call_of(rng, *draw(rng, **shapes), dlse=dlse)


def call_of(rng: np.random.Generator, query, key, value, *args, dlse: bool = True, **options) -> Call:
    """A call with random cotangents of out and, if `dlse`, of lse."""
    dout = rng.standard_normal((*query.shape[:-1], value.shape[-1]), dtype=np.float32)
    of_lse = rng.standard_normal(query.shape[:-1], dtype=np.float32)
    cotangents = mx.array(dout).astype(query.dtype), mx.array(of_lse) if dlse else None
    return Call(query, key, value, *cotangents, *args, **options)


def flash(call: Call) -> tuple[list[mx.array], Gradients]:
    """Calls mx.vjp of flash_attention. Returns [out], or [out, lse] if lse has a cotangent, and the gradients."""
    options = {"scale": call.scale, "mask": call.mask, "softcap": call.softcap, "alibi_slopes": call.alibi_slopes}

    def results(query, key, value, sinks=None):
        out, lse = flash_attention(query, key, value, **options, sinks=sinks, return_lse=True)
        return [out] if call.dlse is None else [out, lse]

    primals = [call.query, call.key, call.value] + ([] if call.sinks is None else [call.sinks])
    outputs, gradients = mx.vjp(results, primals, [call.dout] if call.dlse is None else [call.dout, call.dlse])
    return outputs, Gradients(*gradients)


def flash_gradients(call: Call) -> Gradients:
    return flash(call)[1]


def unfused_gradients(
    call: Call, dtype=np.float64, after_a_forward: bool = False, rounds_out: bool = False
) -> Gradients:
    """Computes the gradients by the unfused formula in `dtype`.

    after_a_forward: out and lse come from a forward pass in float64. Otherwise they are computed in `dtype`.
    rounds_out: rounds out to the call's dtype before its product with dout.
    """
    cast = lambda a: np.asarray(a, dtype)  # noqa: E731
    query, key, value, dout = (cast(to_numpy(a)) for a in (call.query, call.key, call.value, call.dout))
    batch, kv_heads, group = key.shape[:-3], key.shape[-3], query.shape[-3] // key.shape[-3]
    length, key_len = query.shape[-2], key.shape[-2]
    key, value = np.repeat(key, group, axis=-3), np.repeat(value, group, axis=-3)
    scale = cast(query.shape[-1] ** -0.5 if call.scale is None else call.scale)
    visible, bias = visible_and_bias(query.shape, key_len, call.mask)
    sinks = cast(-np.inf if call.sinks is None else per_head(to_numpy(call.sinks)))

    with np.errstate(invalid="ignore", over="ignore"):  # hidden keys may be NaN or infinite
        scores = query @ key.swapaxes(-1, -2) * scale
        slope_of_cap = 1
        if call.softcap is not None:
            bounded = np.tanh(scores / cast(call.softcap))
            scores, slope_of_cap = cast(call.softcap) * bounded, 1 - bounded * bounded
        if call.alibi_slopes is not None:
            scores = scores - cast(per_head(to_numpy(call.alibi_slopes))) * cast(np.abs(distance(length, key_len)))
        scores = np.where(visible, scores + cast(bias), -np.inf)
        sees_any = (scores != -np.inf).any(axis=-1, keepdims=True)
        out, lse = call.forward() if after_a_forward else (None, None)
        # row_max may be any number near the row's maximum, because row_sum is computed with the same row_max. The code
        # does not round lse to float32, because in it a large maximum would round the logarithm of the sum away.
        row_max = (
            np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
            if lse is None
            else lse[..., None] - 2
        )
        row_max = np.where(sees_any, cast(row_max), 0)
        weights, sink_weights = np.exp(scores - row_max), np.exp(sinks - row_max)
        row_sum = one_after_the_other(weights) + sink_weights if lse is None else np.exp(lse[..., None] - row_max)
        row_sum = np.where(sees_any, cast(row_sum), 1)
        probabilities, sink_probabilities = weights / row_sum, sink_weights / row_sum
        out = weighted_sum(probabilities, value) if out is None else cast(out)
        if rounds_out:
            out = to_numpy(mx.array(out).astype(call.query.dtype))
        delta = (dout * out).sum(axis=-1, keepdims=True)
        if call.dlse is not None:
            delta = delta - cast(to_numpy(call.dlse))[..., None]
        dscores = probabilities * (dout @ value.swapaxes(-1, -2) - delta)
        dscores = np.where(probabilities == 0, 0, dscores)
        dproducts = np.where(probabilities == 0, 0, dscores * slope_of_cap)

    of_group = lambda a: a.reshape(*batch, kv_heads, group, *a.shape[-2:]).sum(axis=-3)  # noqa: E731
    of_heads = lambda rows: rows.sum(axis=-1).reshape(-1, query.shape[-3]).sum(axis=0)  # noqa: E731
    dsinks = dslopes = dbias = None
    if call.sinks is not None:
        dsinks = of_heads(np.where(sees_any, -sink_probabilities * delta, 0)[..., 0])
    if call.alibi_slopes is not None:
        dslopes = of_heads((-dscores * np.abs(distance(length, key_len))).sum(axis=-1))
    if (added := bias_of(call)) is not None:
        dbias = summed_to(added.shape, dscores)
    return Gradients(
        dq=dproducts @ key * scale,
        dk=of_group(dproducts.swapaxes(-1, -2) @ query * scale),
        dv=of_group(probabilities.swapaxes(-1, -2) @ dout),
        dsinks=dsinks,
        dslopes=dslopes,
        dbias=dbias,
    )


def one_after_the_other(a: np.ndarray) -> np.ndarray:
    """Sums the last axis term by term, as MLX and the kernels do. numpy's own sums are more exact."""
    return np.cumsum(np.concatenate([np.zeros_like(a, shape=(*a.shape[:-1], 1)), a], axis=-1), axis=-1)[..., -1:]


def weighted_sum(probabilities: np.ndarray, value: np.ndarray) -> np.ndarray:
    """probabilities @ value. Leaves out values whose probability is 0, because 0 * NaN is NaN."""
    if np.isfinite(value).all():
        return probabilities @ value
    products = probabilities[..., None] * value[..., None, :, :]
    return np.where(probabilities[..., None] == 0, 0, products).sum(axis=-2)


def bias_of(call: Call) -> mx.array | None:
    """The additive array among the call's masks."""
    return lower(call.mask).get("bias")


def summed_to(shape: tuple[int, ...], a: np.ndarray) -> np.ndarray:
    """Undoes a broadcast from `shape`: sums `a` over axes that `shape` lacks, and over axes of size 1 in `shape`."""
    a = a.sum(axis=tuple(range(a.ndim - len(shape))))
    return a.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def assert_equal_weights(call: Call, got: Gradients) -> None:
    """Asserts that the gradients are those of attention with the same weight for each key.

    The call must have a mask that adds -1e9 or less to each score. The float32 sum of query @ key.T and such a number
    is the number alone. In float64 it need not be, so assert_obeys_the_rule() does not apply. The call must have one
    key/value head per query head, and no cotangent of lse.
    """
    query, key, value, dout = (to_numpy(a).astype(np.float64) for a in (call.query, call.key, call.value, call.dout))
    weight = 1 / key.shape[-2]
    dprobabilities = dout @ value.swapaxes(-1, -2)
    dscores = weight * (dprobabilities - dprobabilities.mean(axis=-1, keepdims=True)) * query.shape[-1] ** -0.5
    expected = {"dq": dscores @ key, "dk": dscores.swapaxes(-1, -2) @ query}
    expected["dv"] = np.broadcast_to(weight * dout.sum(axis=-2, keepdims=True), value.shape)
    for name, truth in expected.items():
        np.testing.assert_allclose(to_numpy(getattr(got, name)), truth, atol=1e-5, err_msg=name)


def assert_obeys_the_rule(call: Call, got: Gradients | None = None, rounds_out: bool = False) -> None:
    """All gradients must obey the rule of this file. got: the gradients; None: those of flash_attention()."""
    got = got or flash_gradients(call)
    expected = unfused_gradients(call)

    @functools.cache
    def by_steps(way: tuple[int, bool]) -> Gradients:
        return unfused_in_order(call, *way, rounds_out)

    inputs = (call.query, call.key, call.value, call.sinks, call.alibi_slopes, bias_of(call))
    for field, given in zip(fields(Gradients), inputs, strict=True):
        result = getattr(got, field.name)
        if result is None:
            continue
        assert result.shape == given.shape
        assert result.dtype == given.dtype
        truth = getattr(expected, field.name)

        def unfused(way, name: str = field.name, truth: np.ndarray = truth, dtype: mx.Dtype = given.dtype):
            return rounded_away(getattr(by_steps(way), name), truth, dtype)

        ways = [functools.partial(unfused, way) for way in itertools.product(range(ORDERS), (False, True))]
        assert_within_rule(to_numpy(result), truth, ways, field.name)


def assert_both_ways(*args, **options) -> None:
    """out, lse and the gradients of a call with these arguments must obey the rule."""
    assert_matches_reference(*args, **options)
    assert_obeys_the_rule(call_of(np.random.default_rng(0), *args, **options))


def unfused_in_order(call: Call, order: int, after_a_forward: bool, rounds_out: bool) -> Gradients:
    """unfused_gradients() in float32, with shuffled columns, so that sums over columns are taken in another order.

    order: the seed of the shuffle; 0: not shuffled.
    """
    shuffle = np.random.default_rng(order).permutation if order else np.arange
    dims, value_dims = shuffle(call.query.shape[-1]), shuffle(call.value.shape[-1])
    of = lambda a, picked: a[..., mx.array(picked)]  # noqa: E731
    shuffled = replace(
        call,
        query=of(call.query, dims),
        key=of(call.key, dims),
        value=of(call.value, value_dims),
        dout=of(call.dout, value_dims),
    )
    result = unfused_gradients(shuffled, np.float32, after_a_forward, rounds_out)
    back, value_back = np.argsort(dims), np.argsort(value_dims)
    return replace(result, dq=result.dq[..., back], dk=result.dk[..., back], dv=result.dv[..., value_back])


def rounded_away(a: np.ndarray, truth: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Moves `a` away from `truth` by the largest rounding error of a 16-bit `dtype`: half a unit in its last place."""
    if dtype == mx.float32:
        return a
    unit = np.exp2(np.maximum(np.frexp(a)[1] - 1, np.log2(mx.finfo(dtype).smallest_normal))) * mx.finfo(dtype).eps
    return a + np.copysign(unit / 2, a - truth)
