"""Checks a GPU kernel for calls of one drawn.Kind. Compares its results with the CPU's on small random inputs.

Calls of one kind may have full or partial tiles, one or many chunks of keys, strided or misaligned rows, and NaN in
hidden keys. So the inputs have all of these.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from . import _ext
from .arguments import lowered
from .drawn import Kind, Named, drawn

# The allowed relative error. Tensor cores truncate sums, and kernels add in different orders.
ERROR = 1e-5

# Numbers of keys to check with few queries. Kernels read 90 keys in one chunk or a few, and split 2400 keys into more
# chunks than they merge at once.
FEW_KEYS = (90, 2400)

NO_MEMORY = re.compile("out of memory|unable to allocate|out_of_memory", re.IGNORECASE)

_GRADIENTS, _GRADIENT_ERROR = ("dq", "dk", "dv", "dsinks"), 3e-5  # larger than ERROR, as gradients sum over all rows

Attention = Callable[..., tuple[mx.array, ...]]  # flash_attention's arguments -> (out, lse) or gradients
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A call to check, with the memory layouts (see LAYOUTS) to check it in."""

    name: str
    arguments: Named
    layouts: tuple[str, ...]


class KernelWarning(UserWarning):
    """A kernel failed its check on this machine and is not used. The text names the kernel and the error."""


def of_call(arguments: _ext.Arguments, kernel: str, stream: mx.Stream) -> str:
    """Checks a kernel for calls like this one. If it fails, warns and returns the error. Otherwise returns ""."""
    kind = Kind(*arguments.kind())
    error = error_of(kernel, kind, arguments.rounds)
    how: Named = {"stream": stream, "precision": "input" if arguments.rounds else "float32"}
    if "backward" in kernel:
        wrong = gradient_failure(kind, partial(_gradients, **how), error=error)
    else:
        lengths = lengths_of(kind, kernel)
        wrong = failure(kind, partial(_attend, **how, kernel=kernel), partial(_attend, stream=mx.cpu), lengths, error)
    if not wrong:
        return ""
    where = f"{mx.device_info(stream.device)['device_name']}, mlx {mx.__version__}"  # type: ignore[attr-defined]
    wrong = f"{kernel} fails its check on {where}: {wrong}"
    if report := _ext.keep("failed", wrong, ""):
        wrong += f". Please send us the file {report}"
    warnings.warn(wrong, KernelWarning, stacklevel=2)
    return wrong


def _attend(*, stream: Any, **arguments: Any) -> tuple[mx.array, mx.array]:
    outputs: tuple[mx.array, mx.array] = _ext.attention_by_table(lowered(**arguments), True, stream)
    return outputs


def _gradients(*, stream: Any, **arguments: Any) -> tuple[mx.array, ...]:
    """Gradients of query, key, value, and of sinks if given."""
    names = [name for name in ("query", "key", "value", "sinks") if name in arguments]

    def outputs(*changed: mx.array) -> tuple[mx.array, mx.array]:
        of_them: Named = dict(zip(names, changed, strict=True))
        return _attend(**arguments | of_them, stream=stream)

    return tuple(mx.vjp(outputs, [arguments[name] for name in names], come_back(arguments))[1])


def come_back(arguments: Named) -> list[mx.array]:
    """Random cotangents of out and lse. They are large, so that the gradients are large."""
    query, value = arguments["query"], arguments["value"]
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 2)
        dout = mx.random.uniform(-32, 32, (*query.shape[:-1], value.shape[-1]), key=keys[0])
        return [dout.astype(query.dtype), mx.random.uniform(-32, 32, query.shape[:-1], key=keys[1])]


def gradient_failure(
    kind: Kind, gradients: Attention, lengths: Lengths | None = None, error: float | None = None
) -> str:
    """Compares the function `gradients` with the CPU's gradients in kind.dtype. Returns the error, or ""."""

    def on_cpu(**arguments: Any) -> tuple[mx.array, ...]:
        rows = _with_rows(arguments, lambda x: x.astype(kind.dtype))  # failure() passes float32
        with mx.stream(mx.cpu):
            return tuple(x.astype(mx.float32) for x in _gradients(**rows, stream=mx.cpu))

    error = error or error_of("backward", kind, False)
    return failure(kind, gradients, on_cpu, lengths, error, _GRADIENTS)


def failure(
    kind: Kind,
    attention: Attention,
    on_cpu: Attention,
    lengths: Lengths | None = None,
    error: float = ERROR,
    names: Sequence[str] = ("out", "lse"),
) -> str:
    """Compares `attention` with `on_cpu` for calls of the kind. Returns the first error, or "".

    lengths: pairs of a number of queries and a number of keys. None means lengths_of(kind).
    error: the allowed error of a result before the result is rounded to its dtype. It is relative to the larger of
    size_of() and the expected number. The error allowed for lse is always ERROR.
    names: the names of the results.

    Raises MemoryError if there is too little memory for the check. This says nothing about the kernel.
    """
    for case in cases(kind, lengths or lengths_of(kind)):
        expected = on_cpu(**exactly(case.arguments))
        for layout in case.layouts:
            try:
                got = attention(**laid_out(case.arguments, layout))
                mx.eval(got)
            except (RuntimeError, ValueError) as raised:
                if NO_MEMORY.search(str(raised)):
                    raise MemoryError(f"there is no memory to check a kernel: {raised}") from raised
                return f"{case.name}, {layout}: {raised}"
            for name, found, wanted in zip(names, got, expected, strict=False):  # dsinks only if the call has sinks
                if wrong := difference(found, wanted, ERROR if name == "lse" else error, size_of(name, wanted)):
                    return f"{case.name}, {layout}: {name} {wrong}"
    return ""


def size_of(name: str, expected: mx.array) -> float:
    """The number to which errors are relative: 1 for out and lse, and the root mean square of a gradient. An element of
    a gradient may be near 0 and still be a sum of terms of that size. Each term changes if the last bit of `out`
    differs."""
    if name not in _GRADIENTS:
        return 1.0
    with mx.stream(mx.cpu):
        finite = mx.where(mx.isnan(expected), 0, expected)
        return float(mx.sqrt(mx.mean(finite * finite)))


def error_of(kernel: str, kind: Kind, rounds: bool) -> float:
    """The allowed error of out, or of a gradient, before rounding to its dtype. A kernel that rounds probabilities to
    16 bits may change each of them, and therefore out, by eps / 2. Backward kernels round P and dS."""
    eps = float(mx.finfo(kind.dtype).eps)
    if "backward" in kernel:
        return max(_GRADIENT_ERROR, 8 * eps if rounds else eps)
    return max(ERROR, eps / 2) if rounds and kernel.startswith("cuda_prefill") and not kind.bits else ERROR


def lengths_of(kind: Kind, kernel: str = "") -> Lengths:
    """Pairs of a number of queries and a number of keys to check the kernel with."""
    if kind.query_len <= _ext.few_queries:
        return [(kind.query_len, keys) for keys in FEW_KEYS]
    sharing = [_ext.checked_sharing] if kernel.startswith("cuda_prefill") else []
    return [*_ext.checked_lengths, *sharing]


def cases(kind: Kind, lengths: Lengths) -> Iterator[Case]:
    """Draws calls of the kind with these lengths. Their arrays are contiguous."""
    # cuda_prefill splits keys only in a last wave that would leave multiprocessors idle. So the call that checks this
    # has one sequence and one key/value head.
    few: dict[tuple[int, int], Any] = {_ext.checked_sharing: {"batch": 1, "kv_heads": 1}}
    for query_len, key_len in lengths:
        drawn_call = drawn(kind, query_len, key_len, **few.get((query_len, key_len), {}))
        yield Case(f"{query_len} queries, {key_len} keys", drawn_call, LAYOUTS)
    if kind.hides():
        for pair in {lengths[0], *(pair for pair in lengths if pair in few)}:
            yield Case("NaN in hidden keys", drawn(kind, *pair, hidden_nan=True, **few.get(pair, {})), LAYOUTS[:1])


def difference(got: mx.array, expected: mx.array, error: float = ERROR, size: float = 1.0) -> str:
    """Describes how `got` differs from `expected` (float32). Returns "" if all numbers agree up to `error` and
    rounding to got's dtype. `error` is relative to the larger of `size` and the expected number."""
    with mx.stream(mx.cpu):
        far = error * mx.maximum(mx.abs(expected), size)
        lowest, highest = ((expected + by).astype(got.dtype) for by in (-far, far))
        both_nan = mx.isnan(got) & mx.isnan(expected)
        wrong = ~((lowest <= got) & (got <= highest) | (got.astype(mx.float32) == expected) | both_nan)
        count = int(wrong.sum())
        if count == 0:
            return ""
        off = mx.where(wrong, mx.abs(got.astype(mx.float32) - expected), 0)
        return f"is wrong in {count} of {got.size} numbers, by up to {float(mx.max(off)):.2g}"


def exactly(arguments: Named) -> Named:
    """The same call with its unquantised arrays cast to float32."""
    return _with_rows(arguments, lambda x: x.astype(mx.float32))


# Memory layouts of query, key and value, see laid_out().
LAYOUTS = ("contiguous", "strided", "misaligned")


def laid_out(arguments: Named, layout: str) -> Named:
    """The same call with query, and key and value unless they are quantised, in this memory layout. Copies them unless
    the layout is "contiguous"."""

    def laid(x: mx.array) -> mx.array:
        if layout == "strided":
            return mx.repeat(x, 2, axis=-1)[..., ::2]
        if layout == "misaligned":
            return mx.concatenate([x[..., :1], x], axis=-1)[..., 1:]
        return x

    return _with_rows(arguments, laid)


def _with_rows(arguments: Named, change: Callable[[mx.array], mx.array]) -> Named:
    rows = [name for name in ("query", "key", "value") if isinstance(arguments[name], mx.array)]
    with mx.stream(mx.cpu):
        changed = {name: change(arguments[name]) for name in rows}
        mx.eval(changed)
    return {**arguments, **changed}
