"""Gradients of query, key and value by the Metal kernels, run on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from flashattn_core import _ext
from flashattn_core.attention import lowered_arguments
from gradient_oracle import Call, Gradients
from metal_attention import NUMPY_DTYPES, execute, to_mlx
from metal_on_cpu import Counts, Undefined
from metal_on_cpu.program import Buffer

DELTA, DQ, DK, DV = 21, 22, 23, 24  # bindings, see csrc/metal/launch.h


@dataclass(frozen=True, kw_only=True)
class CountedGradients(Gradients):
    counts: dict[str, Counts]  # by the name of the file


def launches(call: Call, saved: tuple[mx.array, mx.array] | None = None):
    out, lse = saved or call.saved()
    arguments = lowered_arguments(
        call.query, call.key, call.value, call.scale, call.mask, call.softcap, call.sinks, call.alibi_slopes, "auto"
    )
    return _ext.metal_backward_launches(arguments, out, lse, call.dout, call.dlse)


def run(call: Call, saved=None, schedule: str = "forward", edit=lambda source: source) -> CountedGradients:
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
    return CountedGradients(*results, counts=dict(zip(names, counts, strict=True)))


def type_name(dtype: mx.Dtype) -> str:
    return {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}[dtype]
