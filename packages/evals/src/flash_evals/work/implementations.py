"""The attention implementations that `flash-eval kernels` compares, each prepared for one workload.

The preparation is not timed. It makes arrays in the workload's dtype and, if the implementation needs it, a mask array.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import flashattn_core
import mlx.core as mx
import numpy as np
from flashattn_core.arguments import Precision
from flashattn_core.masks import Causal, SlidingWindow
from mlxlm_flash_patch import mlx_own

from flash_evals.results.workload import GROUP_SIZE, Inputs, Pass, Workload
from flash_evals.work import machine

TORCH = "torch==2.13.0"  # the version that the extra `torch` installs
EVALUATIONS = 8  # mx.async_eval() calls per trial on a GPU; a single one would need all calls' scratch memory at once

OUTPUT, GRADIENTS = ["output"], ["gradient of query", "gradient of key", "gradient of value"]
# Pass -> names of a call's results, in the order in which the call returns them.
RESULTS: dict[Pass, list[str]] = {"forward": OUTPUT, "backward": GRADIENTS, "forward_backward": OUTPUT + GRADIENTS}

Attention = Callable[..., Any]  # (query, key, value) -> output, as arrays of MLX or torch
Call = Callable[[], Sequence[Any]]  # runs the pass once; returns arrays of MLX or torch


class Contestant:
    """An implementation with its inputs, as MLX arrays.

    compute() passes all calls to mx.async_eval() and waits once, after the last call, as mlx-lm does while it
    generates. To wait for each call would add some 50 µs per call, the time to switch to MLX's thread. On a GPU, each
    mx.async_eval() gets several calls, because passing short calls one by one would take longer than computing them.
    """

    def __init__(
        self,
        attention: Callable[[Workload, Precision], Attention],
        workload: Workload,
        pass_: Pass,
        inputs: Inputs,
        precision: Precision = "float32",
    ) -> None:
        self.attention, self.pass_ = attention(workload, precision), pass_
        *self.inputs, self.cotangent = self.place(workload, inputs)

    def prepare(self) -> Call:
        """Prepares one call. For a backward pass, this also computes the forward pass before it."""
        if self.pass_ == "forward":
            return lambda: [self.attention(*self.inputs)]
        if self.pass_ == "forward_backward":
            return self.both
        output, gradients = self.begin()
        self.hand_over([output])  # computes the forward pass; the gradients keep what they need of it
        mx.synchronize()
        return gradients

    def compute(self, calls: list[Call]) -> Sequence[Any]:
        """Runs the calls and empties the list. Returns the evaluated results of the call that ran last."""
        lot: list[Sequence[Any]] = []
        size = max(1, len(calls) // EVALUATIONS) if machine.kind() == "gpu" else 1
        while calls:
            lot = [calls.pop()() for _ in range(min(size, len(calls)))]
            self.hand_over(lot)
        mx.synchronize()
        return lot[-1]

    def both(self) -> Sequence[Any]:
        output, gradients = self.begin()
        return [output, *gradients()]

    def place(self, workload: Workload, inputs: Inputs) -> Sequence[Any]:
        arrays: list[Any] = [mx.array(array).astype(getattr(mx, workload.dtype)) for array in inputs]
        if workload.kv_bits:
            arrays[1:3] = [mx.quantize(x, GROUP_SIZE, workload.kv_bits) for x in arrays[1:3]]
        mx.eval(arrays)
        return arrays

    def begin(self) -> tuple[Any, Call]:
        """Returns the output of a forward pass, and a function that returns the gradients."""
        [output], gradients = mx.vjp(self.attention, self.inputs, [self.cotangent])
        return output, lambda: gradients

    def hand_over(self, results: Sequence[Any]) -> None:
        mx.async_eval(results)  # type: ignore[no-untyped-call]  # MLX's stubs leave it out

    def as_numpy(self, results: Sequence[Any]) -> list[np.ndarray]:
        return [np.array(result.astype(mx.float32)) for result in results]


class TorchContestant(Contestant):
    """A Contestant with torch tensors. torch computes eagerly, so hand_over() has nothing to do."""

    def place(self, workload: Workload, inputs: Inputs) -> Sequence[Any]:
        torch = import_module("torch")
        tensors = [torch.tensor(array).to(getattr(torch, workload.dtype)) for array in inputs]
        for tensor in tensors[:3]:
            tensor.requires_grad_(self.pass_ != "forward")  # otherwise torch records no graph
        return tensors

    def begin(self) -> tuple[Any, Call]:
        output = self.attention(*self.inputs)
        return output, partial(import_module("torch").autograd.grad, output, self.inputs, self.cotangent)

    def hand_over(self, results: Sequence[Any]) -> None:
        pass

    def as_numpy(self, results: Sequence[Any]) -> list[np.ndarray]:
        return [np.asarray(result.detach().float().numpy()) for result in results]


def flash(workload: Workload, precision: Precision) -> Attention:
    mask = SlidingWindow(workload.window) if workload.window else Causal() if workload.causal else None
    if not workload.kv_bits:
        return partial(flashattn_core.flash_attention, mask=mask, precision=precision)
    quantised = {"group_size": GROUP_SIZE, "bits": workload.kv_bits}
    return partial(flashattn_core.quantized_flash_attention, mask=mask, precision=precision, **quantised)


def mlx(workload: Workload, _: Precision) -> Attention:
    how: dict[str, Any] = {"scale": workload.head_dim**-0.5}
    how["mask"] = "causal" if workload.causal and not workload.window else _mlx_mask(workload)
    if not workload.kv_bits:
        return partial(mlx_own.mlx_attention, **how)  # MLX's own attention, even if the patch is on
    # MLX has no attention over quantised keys. mlx-lm's scales the query in place, so it gets a copy of the query.
    attention = import_module("mlx_lm.models.base").quantized_scaled_dot_product_attention
    how |= {"group_size": GROUP_SIZE, "bits": workload.kv_bits}
    return lambda query, key, value: attention(query[:], key, value, **how)


def naive(workload: Workload, _: Precision) -> Attention:
    mask = _mlx_mask(workload)
    scale = workload.head_dim**-0.5
    # The query gets an extra axis for the query heads that share a key/value head. Keys and values broadcast along it.
    grouped = (workload.batch_size, workload.num_kv_heads, -1, workload.query_len, workload.head_dim)

    def attention(query: mx.array, key: mx.array, value: mx.array) -> mx.array:
        scores = query.reshape(grouped) @ key[:, :, None].swapaxes(-1, -2) * scale
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        weights = mx.softmax(scores, axis=-1, precise=True)
        return (weights @ value[:, :, None]).reshape(query.shape)

    return attention


def torch(workload: Workload, _: Precision) -> Attention:
    torch = import_module("torch")
    torch.set_num_threads(threads())
    visible = workload.mask()
    # torch aligns its causal mask to the upper left corner, which is right only if there are as many keys as queries.
    is_causal = visible is not None and not workload.window and workload.query_len == workload.seq_len
    mask = None if visible is None or is_causal else torch.tensor(visible)
    attention = torch.nn.functional.scaled_dot_product_attention
    return partial(attention, attn_mask=mask, is_causal=is_causal, enable_gqa=True)


IMPLEMENTATIONS: dict[str, Callable[..., Contestant]] = {
    "flash": partial(Contestant, flash),
    "mlx": partial(Contestant, mlx),
    "naive": partial(Contestant, naive),
    "torch": partial(TorchContestant, torch),
}
QUANTISED = ("flash", "mlx")  # the implementations that take quantised keys and values


def installed() -> list[str]:
    """The implementations that can run here. torch is one of them only if it is installed and MLX uses the CPU."""
    return [name for name in IMPLEMENTATIONS if name != "torch" or (machine.kind() == "cpu" and find_spec("torch"))]


def threads() -> int:
    """How many threads flash attention uses on the CPU, from the backend's description, such as `AVX2, 2 threads`."""
    [number] = re.findall(r"(\d+) threads?$", flashattn_core.backends()["cpu"])
    return int(number)


def _mlx_mask(workload: Workload) -> mx.array | None:
    visible = workload.mask()
    return None if visible is None else mx.array(visible)
