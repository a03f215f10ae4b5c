"""Computes gradients with Metal's or CUDA's kernels, on the CPU. The op computes the gradient of sinks itself."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from flashattn_core.arguments import lowered

from tests import launches
from tests.core.gradient_oracle import Call, Gradients
from tests.emulators.metal_on_cpu import Counts, Undefined
from tests.emulators.metal_on_cpu.program import Buffer
from tests.metal.metal_attention import NUMPY_DTYPES, TYPES, execute, to_mlx

Saved = tuple[mx.array, mx.array, mx.array]
"""out (or exact_out, if the call saves it), lse and row_stats, as the forward kernels leave them."""


@dataclass(frozen=True, kw_only=True)
class CountedGradients(Gradients):
    counts: dict[str, Counts]  # by the kernel's file name


def exactly_saved(call: Call, precision: str = "float32") -> Saved:
    """Returns (out, lse, row_stats) as an exact forward pass saves them. With precision="input", out is rounded.

    row_stats holds a number near each row's maximum, and the sum of exponentials relative to this number. Here the
    number is lse - 2, so the sum is exp(2).
    """
    out, lse = call.forward()
    row_max = (lse - 2).astype(np.float32)
    with np.errstate(invalid="ignore"):
        row_sum = np.where(lse == -np.inf, 0, np.exp(lse - row_max))
    saved = (mx.array(array.astype(np.float32)) for array in (out, lse, np.stack([row_max, row_sum], axis=-1)))
    exact_out, *others = saved
    return exact_out.astype(call.query.dtype) if precision == "input" else exact_out, *others


def described(call: Call, saved: Saved | None = None, device: str = "metal", precision: str = "float32"):
    options = {"softcap": call.softcap, "sinks": call.sinks, "alibi_slopes": call.alibi_slopes, "precision": precision}
    arguments = lowered(call.query, call.key, call.value, call.scale, call.mask, **options)
    dlse = mx.zeros(call.query.shape[:-1]) if call.dlse is None else call.dlse
    return launches.backward(arguments, *(saved or exactly_saved(call, precision)), call.dout, dlse, device)


def run(
    call: Call,
    saved: Saved | None = None,
    schedule: str = "forward",
    edit=lambda source: source,
    device: str = "metal",
    precision: str = "float32",
):
    """Runs the backward pass. `saved` is what a forward pass has saved; None means exactly_saved(call).

    The other arguments are those of metal_attention.run().
    """
    dtype = call.query.dtype
    saved = saved or exactly_saved(call, precision)
    each = described(call, saved, device, precision)
    tensors = {"dq": call.query, "dk": call.key, "dv": call.value}
    written: dict[str, Buffer] = {name: Undefined(like.shape, NUMPY_DTYPES[dtype]) for name, like in tensors.items()}
    if call.query.size == 0:
        written["delta"] = np.zeros(1, np.float32)  # no launch writes it
    counts = execute(each, written, schedule, edit, device)
    names = [launch["function"].split("_" + TYPES[dtype])[0].removeprefix(f"{device}_") for launch in each]
    results = [to_mlx(written[name], dtype) if like.size else like for name, like in tensors.items()]
    dsinks = None
    if call.sinks is not None and call.query.size:
        dsinks = launches.sinks_gradient(call.sinks, *saved[1:], mx.array(written["delta"]).reshape(saved[1].shape))
    return CountedGradients(*results, dsinks=dsinks, counts=dict(zip(names, counts, strict=True)))
