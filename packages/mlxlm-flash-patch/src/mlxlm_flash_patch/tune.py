"""`mlxlm-flash tune` measures what our kernels cost on this GPU, beside MLX's own attention.

It writes a file into the user's cache folder. flashattn_core reads that file when a program first uses the GPU, and
leaves a call to MLX if MLX's own attention is faster.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from typing import Any

import mlx.core as mx
from flashattn_core import _ext, flash_attention
from flashattn_core.check.drawn import drawn

from . import mlx_own

CAUSAL: dict[str, mx.Dtype | None] = {"causal": None}
# Calls of Qwen2.5 0.5B and 7B, and of Llama 3, each in the form in which MLX has a fused kernel. Metal has a decode
# kernel for each of the three numbers of keys. The last call is timed with its gradient.
CALLS = tuple(
    _ext.Call(mx.bfloat16, dim, heads=heads, kv_heads=kv_heads, query_len=query_len, key_len=key_len, rounds=True,
              given=CAUSAL if query_len > 1 else {}, is_traced=is_traced)
    for heads, kv_heads, dim in ((14, 2, 64), (28, 4, 128), (32, 8, 128))
    for query_len, key_len, is_traced in (
        (1, 100, False), (1, 1000, False), (1, 8192, False), (32, 32, False), (512, 512, False), (2048, 2048, False),
        (1024, 1024, True),
    )
)  # fmt: skip
TRIALS, TRIAL_SECONDS, MOST_CALLS = 7, 0.01, 256

Calls = Callable[[int], Any]  # count -> the lazy outputs of that many calls


@dataclass(frozen=True)
class Measured:
    """What a pair costs a kernel in one call, relative to MLX. Both compute the same pairs."""

    kernel: str
    cost: float
    line: str  # all of it in words


def measured() -> Iterator[Measured]:
    """Times CALLS on MLX's default device. Raises ValueError on a CPU."""
    device = mx.default_device()
    if device == mx.cpu:
        raise ValueError("MLX's default device is a CPU, where there is nothing to time")
    on = _ext.device_of(device)
    for call in CALLS:
        choice = _ext.choose(call, on)
        if choice.mlx is None:  # such as a gradient on Metal
            continue
        kernel = _ext.backward_variant(call, on) if call.is_traced else choice.variant
        if kernel is not None:
            named = partial(_ours, kernel=choice.variant.kernel.name)  # raises if the kernel fails its check
            ours, mlx = _in_turns(_calls(call, named), _calls(call, _mlx))
            shape = f"{call.heads}/{call.kv_heads}x{call.head_dim}, {call.query_len} x {call.key_len}"
            gradient = " with its gradient" * call.is_traced
            times = f"{1e6 * ours:,.1f} µs, MLX's own {1e6 * mlx:,.1f} µs, cost {ours / mlx:.2f}"
            name = kernel.kernel.name
            yield Measured(name, ours / mlx, f"{name}, {shape}{gradient}: {times}")


def costs(found: Sequence[Measured]) -> str:
    """The text of the file, in the form of flashattn_core's csrc/call/costs.def. A kernel's cost is its highest."""
    device = mx.default_device()
    source = f"{mx.device_info(device)['device_name']}, mlxlm-flash tune"
    capability = _ext.device_of(device).compute_capability
    highest = {each.kernel: max(one.cost for one in found if one.kernel == each.kernel) for each in found}
    return "".join(f'{{Kernel::{name}, {capability}, {cost:.3f}, "{source}"}},\n' for name, cost in highest.items())


def write(text: str) -> Path:
    """Writes the file for this GPU, readable by this user alone. Raises OSError if that fails."""
    file = _ext.costs_file(mx.default_device())
    if not file:
        raise OSError("there is no cache folder: set FLASHATTN_CACHE or HOME")
    path = Path(file)
    for folder in (path.parent.parent, path.parent):  # parents=True would give the first its default mode
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as out:  # a program that starts now reads a whole file
        out.write(text)
    return Path(out.name).replace(path)


def _ours(query: mx.array, key: mx.array, value: mx.array, mask: Any, kernel: str = "auto") -> mx.array:
    return flash_attention(query, key, value, mask=mask, kernel=kernel, precision="input")


def _mlx(query: mx.array, key: mx.array, value: mx.array, mask: Any) -> mx.array:
    return mlx_own.mlx_attention(query, key, value, scale=query.shape[-1] ** -0.5, mask=mask)


def _calls(call: _ext.Call, attend: Callable[..., mx.array]) -> Calls:
    """Calls in a chain: each query is the output of the call before, as the layers of a model wait for each other.

    Calls with a gradient are independent.
    """
    trial = drawn(call, call.query_len, call.key_len, batch=1, kv_heads=call.kv_heads, stream=mx.default_device())
    query, key, value = rows = [trial[name] for name in ("query", "key", "value")]
    mask = "causal" if "mask" in trial else None

    def chain(count: int) -> Any:
        out = query
        for _ in range(count):
            out = attend(out, key, value, mask)
        return out

    def gradients(count: int) -> Any:
        return [mx.vjp(lambda *rows: attend(*rows, mask), rows, [query]) for _ in range(count)]

    return gradients if call.is_traced else chain


def _in_turns(*sides: Calls) -> list[float]:
    """Median seconds per call. Each trial repeats short calls until they take TRIAL_SECONDS."""
    for calls in sides:
        _seconds(calls, 1)  # compiles
    repeats = [max(1, min(MOST_CALLS, math.ceil(TRIAL_SECONDS / _seconds(calls, 1)))) for calls in sides]
    trials: list[list[float]] = [[] for _ in sides]
    for _ in range(TRIALS):
        for calls, count, seconds in zip(sides, repeats, trials, strict=True):
            seconds.append(_seconds(calls, count) / count)
    return [median(seconds) for seconds in trials]


def _seconds(calls: Calls, count: int) -> float:
    mx.synchronize()
    began = time.perf_counter()
    mx.eval(calls(count))
    mx.synchronize()
    return time.perf_counter() - began
