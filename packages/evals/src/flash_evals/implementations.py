"""The implementations of attention that `flash-eval kernels` compares, each made ready for one workload.

What can be made beforehand is: arrays in the workload's dtype, and masks as arrays for those that know no other.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import flashattn_core
import mlx.core as mx
import numpy as np

from flash_evals import machine
from flash_evals.workload import GROUP_SIZE, Inputs, Pass, Workload

TORCH = "torch==2.13.0"  # the version that the extra `torch` installs
EVALUATIONS = 8  # of a GPU's trial: of a short call's scratch, not all is there at once

GRADIENTS = ("gradient of query", "gradient of key", "gradient of value")
RESULTS: dict[Pass, tuple[str, ...]] = {  # what a call of each pass computes, in this order
    "forward": ("output",),
    "backward": GRADIENTS,
    "forward_backward": ("output", *GRADIENTS),
}

Attention = Callable[..., Any]  # of query, key and value, as the library has them
Call = Callable[[], Sequence[Any]]  # one call of the pass: its results as the library has them


class Contestant(Protocol):
    """An implementation with its inputs in place."""

    def prepare(self) -> Call:
        """One call, and computed what it begins with: a backward pass begins after a forward pass of its own."""

    def compute(self, calls: list[Call]) -> Sequence[Any]:
        """One after the other, until the list is empty: the results of the last, computed; the others are dropped."""

    def as_numpy(self, results: Sequence[Any]) -> list[np.ndarray]:
        """In float32."""


class MlxCalls:
    """Calls are handed to MLX one by one and waited for at the end, as mlx-lm does it while it generates.

    Waiting for each would add the hand-over to MLX's thread, some 50 µs, to every call. A GPU is handed them in
    EVALUATIONS lots, as it takes a model's layers: else the hand-over would take longer than a short call.
    """

    def __init__(
        self, attention: Callable[[Workload], Attention], workload: Workload, pass_: Pass, inputs: Inputs
    ) -> None:
        *arrays, self.cotangent = (mx.array(array).astype(getattr(mx, workload.dtype)) for array in inputs)
        self.inputs: list[Any] = arrays
        if workload.kv_bits:
            query, *others = arrays
            self.inputs = [query, *(mx.quantize(x, GROUP_SIZE, workload.kv_bits) for x in others)]
        mx.eval(self.inputs, self.cotangent)
        self.attention = attention(workload)
        self.pass_ = pass_

    def prepare(self) -> Call:
        if self.pass_ == "forward":
            return lambda: [self.attention(*self.inputs)]
        if self.pass_ == "forward_backward":
            return self._with_gradients
        output, *gradients = self._with_gradients()
        mx.eval(output)  # what the gradients need of the forward pass hangs on their graph, and stays
        return lambda: gradients

    def compute(self, calls: list[Call]) -> Sequence[mx.array]:
        lot: list[Sequence[mx.array]] = []
        size = max(1, len(calls) // EVALUATIONS) if machine.kind() == "gpu" else 1
        while calls:
            lot = [calls.pop()() for _ in range(min(size, len(calls)))]
            mx.async_eval(lot)  # type: ignore[no-untyped-call]  # MLX's stubs leave it out
        mx.synchronize()
        return lot[-1]

    def as_numpy(self, results: Sequence[mx.array]) -> list[np.ndarray]:
        return [np.array(result.astype(mx.float32)) for result in results]

    def _with_gradients(self) -> list[mx.array]:
        outputs, gradients = mx.vjp(self.attention, self.inputs, [self.cotangent])
        return [*outputs, *gradients]


class TorchCalls:
    def __init__(
        self, attention: Callable[[Workload], Attention], workload: Workload, pass_: Pass, inputs: Inputs
    ) -> None:
        self.torch = import_module("torch")
        dtype = getattr(self.torch, workload.dtype)
        *self.inputs, self.cotangent = (self.torch.tensor(array).to(dtype) for array in inputs)
        for tensor in self.inputs:
            tensor.requires_grad_(pass_ != "forward")  # if none does, nothing is recorded
        self.attention = attention(workload)
        self.pass_ = pass_

    def prepare(self) -> Call:
        if self.pass_ == "forward":
            return lambda: [self.attention(*self.inputs)]
        if self.pass_ == "forward_backward":
            return lambda: [output := self.attention(*self.inputs), *self._gradients(output)]
        return partial(self._gradients, self.attention(*self.inputs))

    def compute(self, calls: list[Call]) -> Sequence[Any]:
        results: Sequence[Any] = ()
        while calls:
            results = calls.pop()()
        return results

    def as_numpy(self, results: Sequence[Any]) -> list[np.ndarray]:
        return [np.asarray(result.detach().float().numpy()) for result in results]

    def _gradients(self, output: Any) -> Sequence[Any]:
        gradients: Sequence[Any] = self.torch.autograd.grad(output, self.inputs, self.cotangent)
        return gradients


def flash(workload: Workload) -> Attention:
    mask: flashattn_core.masks.Mask | None = None
    if workload.window:
        mask = flashattn_core.masks.SlidingWindow(workload.window)
    elif workload.causal:
        mask = flashattn_core.masks.Causal()
    if workload.kv_bits:
        quantised = {"group_size": GROUP_SIZE, "bits": workload.kv_bits}
        return partial(flashattn_core.quantized_flash_attention, mask=mask, **quantised)
    return partial(flashattn_core.flash_attention, mask=mask)


def mlx(workload: Workload) -> Attention:
    mask = "causal" if workload.causal and not workload.window else _mlx_mask(workload)
    if workload.kv_bits:
        return partial(_mlx_lm_quantised, mask, workload.kv_bits)
    return partial(mx.fast.scaled_dot_product_attention, scale=workload.head_dim**-0.5, mask=mask)


def naive(workload: Workload) -> Attention:
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


def torch(workload: Workload) -> Attention:
    torch = import_module("torch")
    torch.set_num_threads(threads())
    visible = workload.mask()
    # Its own causal mask is aligned to the upper left: the same thing only where there are as many keys as queries.
    is_causal = visible is not None and not workload.window and workload.query_len == workload.seq_len
    mask = None if visible is None or is_causal else torch.tensor(visible)
    attention = torch.nn.functional.scaled_dot_product_attention
    return partial(attention, attn_mask=mask, is_causal=is_causal, enable_gqa=True)


IMPLEMENTATIONS: dict[str, Callable[[Workload, Pass, Inputs], Contestant]] = {
    "flash": partial(MlxCalls, flash),
    "mlx": partial(MlxCalls, mlx),
    "naive": partial(MlxCalls, naive),
    "torch": partial(TorchCalls, torch),
}


QUANTISED = ("flash", "mlx")  # those that take quantised keys and values


def installed() -> list[str]:
    """What can take part: torch is measured on a CPU alone."""
    return [name for name in IMPLEMENTATIONS if name != "torch" or (machine.kind() == "cpu" and find_spec("torch"))]


def threads() -> int:
    """Of one flash call; the backend ends with them: `AVX2, 2 threads`."""
    [number] = re.findall(r"(\d+) threads?$", flashattn_core.backends()["cpu"])
    return int(number)


def _mlx_lm_quantised(mask: Any, bits: int, query: mx.array, key: Any, value: Any) -> mx.array:
    """MLX has no attention for these; mlx-lm's own function, which scales the array it is given in place."""
    attention = import_module("mlx_lm.models.base").quantized_scaled_dot_product_attention
    scale = query.shape[-1] ** -0.5
    output: mx.array = attention(query[:], key, value, scale, mask, group_size=GROUP_SIZE, bits=bits)
    return output


def _mlx_mask(workload: Workload) -> mx.array | None:
    visible = workload.mask()
    if visible is None:
        return None
    mask = mx.array(visible)
    mx.eval(mask)
    return mask
