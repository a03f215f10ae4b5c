"""Gradients of query, key and value: by the Metal kernels run on the CPU, and by the formula in plain steps."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from flashattn_core import _ext
from flashattn_core.attention import lowered_arguments
from flashattn_core.reference import distance, per_head, reference_attention, visible_and_bias
from metal_attention import NUMPY_DTYPES, execute, to_mlx
from metal_on_cpu import Counts, Undefined
from metal_on_cpu.program import Buffer
from oracle import draw, to_numpy

DELTA, DQ, DK, DV = 21, 22, 23, 24  # bindings, see csrc/metal/launch.h


@dataclass(frozen=True)
class Gradients:
    dq: mx.array
    dk: mx.array
    dv: mx.array
    counts: dict[str, Counts]  # by the name of the file


@dataclass(frozen=True)
class Call:
    """One call, and what the gradients of its results are."""

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
        options = {"softcap": self.softcap, "sinks": self.sinks, "alibi_slopes": self.alibi_slopes}
        options = {name: to_numpy(x) if isinstance(x, mx.array) else x for name, x in options.items()}
        arrays = map(to_numpy, (self.query, self.key, self.value))
        return reference_attention(*arrays, self.scale, self.mask, **options)

    def saved(self) -> tuple[mx.array, mx.array]:
        """out and lse as a forward leaves them."""
        out, lse = self.forward()
        return mx.array(out.astype(np.float32)).astype(self.query.dtype), mx.array(lse.astype(np.float32))


def draw_call(rng: np.random.Generator, *, dlse: bool = True, **shapes) -> Call:
    query, key, value = draw(rng, **shapes)
    dout = rng.standard_normal((*query.shape[:-1], value.shape[-1]), dtype=np.float32)
    of_lse = rng.standard_normal(query.shape[:-1], dtype=np.float32)
    return Call(query, key, value, mx.array(dout).astype(query.dtype), mx.array(of_lse) if dlse else None)


def launches(call: Call, saved: tuple[mx.array, mx.array] | None = None):
    out, lse = saved or call.saved()
    arguments = lowered_arguments(
        call.query, call.key, call.value, call.scale, call.mask, call.softcap, call.sinks, call.alibi_slopes, "auto"
    )
    return _ext.metal_backward_launches(arguments, out, lse, call.dout, call.dlse)


def run(call: Call, saved=None, schedule: str = "forward", edit=lambda source: source) -> Gradients:
    """`saved`: (out, lse) of the forward; None: its exact ones, rounded. `edit`: as in metal_attention.run."""
    dtype = call.query.dtype
    described = launches(call, saved)
    tensors = {DQ: call.query, DK: call.key, DV: call.value}
    written: dict[int, Buffer] = {index: Undefined(like.shape, NUMPY_DTYPES[dtype]) for index, like in tensors.items()}
    if call.query.size == 0:
        written[DELTA] = np.zeros(1, np.float32)  # no launch writes it
    counts = execute(described, written, schedule, edit)
    names = [launch["function"].split("_" + type_name(dtype))[0].removeprefix("metal_") for launch in described]
    results = [to_mlx(written[index], dtype) if like.size else like for index, like in tensors.items()]
    return Gradients(*results, dict(zip(names, counts, strict=True)))


def type_name(dtype: mx.Dtype) -> str:
    return {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}[dtype]


def plain_gradients(call: Call, out: np.ndarray, lse: np.ndarray, dtype=np.float64) -> list[np.ndarray]:
    """dq, dk, dv, each step in `dtype`, from out and lse of the forward; O(L*S) in memory."""
    cast = lambda a: np.asarray(a, dtype)  # noqa: E731
    query, key, value, dout = (cast(to_numpy(a)) for a in (call.query, call.key, call.value, call.dout))
    out, lse = cast(out), cast(lse)[..., None]
    batch, kv_heads, group = key.shape[:-3], key.shape[-3], query.shape[-3] // key.shape[-3]
    length, key_len = query.shape[-2], key.shape[-2]
    key, value = np.repeat(key, group, axis=-3), np.repeat(value, group, axis=-3)
    scale = cast(query.shape[-1] ** -0.5 if call.scale is None else call.scale)
    visible, bias = visible_and_bias(query.shape, key_len, call.mask)

    with np.errstate(invalid="ignore", over="ignore"):  # of what is hidden
        scores = query @ key.swapaxes(-1, -2) * scale
        slope_of_cap = 1
        if call.softcap is not None:
            bounded = np.tanh(scores / cast(call.softcap))
            scores, slope_of_cap = cast(call.softcap) * bounded, 1 - bounded * bounded
        if call.alibi_slopes is not None:
            scores = scores - cast(per_head(to_numpy(call.alibi_slopes))) * cast(np.abs(distance(length, key_len)))
        scores = np.where(visible & (lse != -np.inf), scores + cast(bias), -np.inf)
        probabilities = np.exp(scores - np.where(lse == -np.inf, 0, lse))
        delta = (dout * out).sum(axis=-1, keepdims=True)
        if call.dlse is not None:
            delta = delta - cast(to_numpy(call.dlse))[..., None]
        dscores = probabilities * (dout @ value.swapaxes(-1, -2) - delta) * slope_of_cap
        dscores = np.where(probabilities == 0, 0, dscores)

    dq = dscores @ key * scale
    dk = dscores.swapaxes(-1, -2) @ query * scale
    dv = probabilities.swapaxes(-1, -2) @ dout
    of_group = lambda a: a.reshape(*batch, kv_heads, group, *a.shape[-2:]).sum(axis=-3)  # noqa: E731
    return [dq, of_group(dk), of_group(dv)]


def assert_obeys_the_rule(call: Call, got: Gradients) -> None:
    """The error is at most twice that of the plain steps in float32, rounded to the call's dtype, plus 1e-5."""
    expected = plain_gradients(call, *call.forward())
    saved = [to_numpy(a) for a in call.saved()]
    by_steps = plain_gradients(call, *saved, dtype=np.float32)
    for name, want, plain in zip(("dq", "dk", "dv"), expected, by_steps, strict=True):
        result = getattr(got, name)
        assert result.shape == want.shape
        assert result.dtype == call.query.dtype
        rounded = to_numpy(mx.array(plain.astype(np.float32)).astype(call.query.dtype))
        error = np.abs(to_numpy(result) - want).max(initial=0)
        allowed = 2 * np.abs(rounded - want).max(initial=0) + 1e-5
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"  # and no NaN
