"""The implementations of attention that `flash-eval kernels` compares, each made ready for one workload.

What can be made beforehand is: arrays in the workload's dtype, and masks as arrays for those that know no other.
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
from flashattn_core import contest
from flashattn_core.arguments import Precision
from flashattn_core.masks import Causal, SlidingWindow

from flash_evals.results.workload import GROUP_SIZE, Inputs, Pass, Workload
from flash_evals.work import machine

TORCH = "torch==2.13.0"  # the version that the extra `torch` installs
EVALUATIONS = 8  # of a GPU's trial: of a short call's scratch, not all is there at once

OUTPUT, GRADIENTS = ["output"], ["gradient of query", "gradient of key", "gradient of value"]
# What a call of each pass computes, in this order.
RESULTS: dict[Pass, list[str]] = {"forward": OUTPUT, "backward": GRADIENTS, "forward_backward": OUTPUT + GRADIENTS}

Attention = Callable[..., Any]  # of query, key and value, as the library has them
Call = Callable[[], Sequence[Any]]  # one call of the pass: its results as the library has them


class Contestant:
    """An implementation with its inputs in place, as arrays of MLX.

    Calls are handed to MLX one by one and waited for at the end, as mlx-lm does it while it generates. Waiting for each
    would add the hand-over to MLX's thread, some 50 µs, to every call. A GPU is handed them in EVALUATIONS lots, as it
    takes a model's layers: else the hand-over would take longer than a short call.
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
        """One call, and computed what it begins with: a backward pass begins after a forward pass of its own."""
        if self.pass_ == "forward":
            return lambda: [self.attention(*self.inputs)]
        if self.pass_ == "forward_backward":
            return self.both
        output, gradients = self.begin()
        self.hand_over([output])  # what the gradients need of the forward pass hangs on their graph, and stays
        mx.synchronize()
        return gradients

    def compute(self, calls: list[Call]) -> Sequence[Any]:
        """One after the other, until the list is empty: the results of the last, computed; the others are dropped."""
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
        """The output of a forward pass, and what gives the gradients."""
        [output], gradients = mx.vjp(self.attention, self.inputs, [self.cotangent])
        return output, lambda: gradients

    def hand_over(self, results: Sequence[Any]) -> None:
        mx.async_eval(results)  # type: ignore[no-untyped-call]  # MLX's stubs leave it out

    def as_numpy(self, results: Sequence[Any]) -> list[np.ndarray]:
        """In float32."""
        return [np.array(result.astype(mx.float32)) for result in results]


class TorchContestant(Contestant):
    """The same with tensors of torch, which computes at once."""

    def place(self, workload: Workload, inputs: Inputs) -> Sequence[Any]:
        torch = import_module("torch")
        tensors = [torch.tensor(array).to(getattr(torch, workload.dtype)) for array in inputs]
        for tensor in tensors[:3]:
            tensor.requires_grad_(self.pass_ != "forward")  # if none does, nothing is recorded
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
        return partial(contest.mlx_attention, **how)  # also in a process that is patched
    # MLX has no attention for these; mlx-lm's own function scales the query that it is given in place.
    attention = import_module("mlx_lm.models.base").quantized_scaled_dot_product_attention
    how |= {"group_size": GROUP_SIZE, "bits": workload.kv_bits}
    return lambda query, key, value: attention(query[:], key, value, **how)


def naive(workload: Workload, _: Precision) -> Attention:
    mask = _mlx_mask(workload)
    scale = workload.head_dim**-0.5
    # The query heads that share a key/value head have a dimension of their own, along which that is broadcast.
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
    # Its own causal mask is aligned to the upper left: the same thing only where there are as many keys as queries.
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
QUANTISED = ("flash", "mlx")  # those that take quantised keys and values


def installed() -> list[str]:
    """What can take part: torch is measured on a CPU alone."""
    return [name for name in IMPLEMENTATIONS if name != "torch" or (machine.kind() == "cpu" and find_spec("torch"))]


def threads() -> int:
    """Of one flash call; the backend ends with them: `AVX2, 2 threads`."""
    [number] = re.findall(r"(\d+) threads?$", flashattn_core.backends()["cpu"])
    return int(number)


def _mlx_mask(workload: Workload) -> mx.array | None:
    visible = workload.mask()
    return None if visible is None else mx.array(visible)
