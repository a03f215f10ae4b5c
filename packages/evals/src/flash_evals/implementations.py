"""The implementations of attention that `flash-eval kernels` compares, each made ready for one workload.

What can be made beforehand is: arrays in the workload's dtype, and masks as arrays for those that know no other.
"""

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import flashattn_core
import mlx.core as mx
import numpy as np

from flash_evals.workload import Workload

TORCH = "torch==2.13.0"  # the version that the extra `torch` installs

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]


class Contestant(Protocol):
    """An implementation with its inputs in place."""

    def once(self) -> Any:
        """One call, computed: its output as the library has it."""

    def repeat(self, calls: int) -> None:
        """So many calls, one after the other; each output is dropped."""

    def as_numpy(self, output: Any) -> np.ndarray:
        """In float32."""


class MlxCalls:
    """Calls are handed to MLX one by one and waited for at the end, as mlx-lm does it while it generates.

    Waiting for each would add the hand-over to MLX's thread, some 50 µs, to every call.
    """

    def __init__(self, call: Callable[[], mx.array]) -> None:
        self.call = call

    def once(self) -> mx.array:
        output = self.call()
        mx.eval(output)
        return output

    def repeat(self, calls: int) -> None:
        for _ in range(calls):
            mx.async_eval(self.call())  # type: ignore[no-untyped-call]  # MLX's stubs leave it out
        mx.synchronize()

    def as_numpy(self, output: mx.array) -> np.ndarray:
        return np.array(output.astype(mx.float32))


class TorchCalls:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.no_grad = import_module("torch").no_grad

    def once(self) -> Any:
        with self.no_grad():
            return self.call()

    def repeat(self, calls: int) -> None:
        with self.no_grad():
            for _ in range(calls):
                self.call()

    def as_numpy(self, output: Any) -> np.ndarray:
        return np.asarray(output.float().numpy())


def flash(workload: Workload, inputs: Inputs) -> Contestant:
    mask: flashattn_core.masks.Mask | None = None
    if workload.window:
        mask = flashattn_core.masks.SlidingWindow(workload.window)
    elif workload.causal:
        mask = flashattn_core.masks.Causal()
    return MlxCalls(partial(flashattn_core.flash_attention, *_mlx_arrays(workload, inputs), mask=mask))


def mlx(workload: Workload, inputs: Inputs) -> Contestant:
    mask = "causal" if workload.causal and not workload.window else _mlx_mask(workload)
    scale = workload.heads.dim**-0.5
    arrays = _mlx_arrays(workload, inputs)
    return MlxCalls(partial(mx.fast.scaled_dot_product_attention, *arrays, scale=scale, mask=mask))


def naive(workload: Workload, inputs: Inputs) -> Contestant:
    query, key, value = _mlx_arrays(workload, inputs)
    mask = _mlx_mask(workload)
    scale = workload.heads.dim**-0.5
    # The query heads that share a key/value head have a dimension of their own, along which that is broadcast.
    grouped = (workload.batch_size, workload.heads.kv, -1, workload.query_len, workload.heads.dim)

    def call() -> mx.array:
        scores = query.reshape(grouped) @ key[:, :, None].swapaxes(-1, -2) * scale
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf)
        weights = mx.softmax(scores, axis=-1, precise=True)
        return (weights @ value[:, :, None]).reshape(query.shape)

    return MlxCalls(call)


def torch(workload: Workload, inputs: Inputs) -> Contestant:
    torch = import_module("torch")
    torch.set_num_threads(threads())
    arrays = [torch.tensor(array).to(getattr(torch, workload.dtype)) for array in inputs]
    visible = workload.visible()
    # Its own causal mask is aligned to the upper left: the same thing only where there are as many keys as queries.
    is_causal = visible is not None and not workload.window and workload.query_len == workload.seq_len
    mask = None if visible is None or is_causal else torch.tensor(visible)
    attention = torch.nn.functional.scaled_dot_product_attention
    return TorchCalls(partial(attention, *arrays, attn_mask=mask, is_causal=is_causal, enable_gqa=True))


IMPLEMENTATIONS: dict[str, Callable[[Workload, Inputs], Contestant]] = {
    "flash": flash,
    "mlx": mlx,
    "naive": naive,
    "torch": torch,
}


def installed() -> list[str]:
    return [name for name in IMPLEMENTATIONS if name != "torch" or find_spec("torch")]


def threads() -> int:
    """Of one flash call; the backend ends with them: `AVX2, 2 threads`."""
    [number] = re.findall(r"(\d+) threads?$", flashattn_core.backends()["cpu"])
    return int(number)


def _mlx_arrays(workload: Workload, inputs: Inputs) -> list[mx.array]:
    arrays = [mx.array(array).astype(getattr(mx, workload.dtype)) for array in inputs]
    mx.eval(arrays)
    return arrays


def _mlx_mask(workload: Workload) -> mx.array | None:
    visible = workload.visible()
    if visible is None:
        return None
    mask = mx.array(visible)
    mx.eval(mask)
    return mask
