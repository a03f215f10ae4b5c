"""Whether a GPU's kernel computes what the CPU's does, on small inputs of a call's kind.

What a kernel meets only when it runs comes in all its forms: tiles that are full and tiles that are not, a chunk of the
keys and many, rows whose elements lie apart or that begin anywhere, NaN in keys that no row sees.
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
from .drawn import HIDES, Kind, Named, drawn

# Tensor cores cut off sums, and other orders of a sum round it in other ways.
ERROR = 1e-5

FEW_KEYS = (90, 2400)  # a chunk; more chunks than are merged at once

NO_MEMORY = re.compile("out of memory|unable to allocate|out_of_memory", re.IGNORECASE)

_GRADIENTS, _GRADIENT_ERROR = ("dq", "dk", "dv", "dsinks"), 3e-5  # sums over all rows of a group

Attention = Callable[..., tuple[mx.array, ...]]  # out and lse, or gradients, of flash_attention's arguments
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A call, what is special about it in words, and in which ways its rows are to lie."""

    name: str
    arguments: Named
    layouts: tuple[str, ...]


class KernelWarning(UserWarning):
    """A kernel failed its check on this machine, and is not used there; the text says which, and how."""


def of_call(arguments: _ext.Arguments, kernel: str, stream: mx.Stream) -> str:
    """Checks a kernel for such calls, on the stream. Returns what is wrong, in words; then there is a warning, too."""
    kind, error = Kind(*arguments.kind()), error_of(kernel, Kind(*arguments.kind()), arguments.rounds)
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
    """Gradients of query, key, value, and sinks if there are some. Cotangents are large, so that gradients are, too."""
    names = [name for name in ("query", "key", "value", "sinks") if name in arguments]

    def outputs(*changed: mx.array) -> tuple[mx.array, mx.array]:
        of_them: Named = dict(zip(names, changed, strict=True))
        return _attend(**arguments | of_them, stream=stream)

    return tuple(mx.vjp(outputs, [arguments[name] for name in names], come_back(arguments))[1])


def come_back(arguments: Named) -> list[mx.array]:
    """What the gradients are of: numbers for out and for lse."""
    query, value = arguments["query"], arguments["value"]
    with mx.stream(mx.cpu):
        keys = mx.random.split(mx.random.key(0), 2)
        dout = mx.random.uniform(-32, 32, (*query.shape[:-1], value.shape[-1]), key=keys[0])
        return [dout.astype(query.dtype), mx.random.uniform(-32, 32, query.shape[:-1], key=keys[1])]


def gradient_failure(
    kind: Kind, gradients: Attention, lengths: Lengths | None = None, error: float | None = None
) -> str:
    """What is wrong with `gradients` for calls of the kind, beside the CPU's of the same dtype; empty if nothing is."""

    def on_cpu(**arguments: Any) -> tuple[mx.array, ...]:
        rows = _with_rows(arguments, lambda x: x.astype(kind.dtype))  # which failure() has in float32
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
    """What is wrong with `attention` for calls of the kind; empty if nothing is.

    on_cpu: the same by the CPU's kernels. lengths: of queries and keys; None: what kernels may treat in another way.
    error: how far off results may be before they are rounded, relative to size_of() or the number if that is more; lse
    is float32.
    names: of the results. Raises MemoryError where there is none for the inputs: that says nothing about the kernel.
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
            for name, found, wanted in zip(names, got, expected, strict=False):  # not each call has sinks
                if wrong := difference(found, wanted, ERROR if name == "lse" else error, size_of(name, wanted)):
                    return f"{case.name}, {layout}: {name} {wrong}"
    return ""


def size_of(name: str, expected: mx.array) -> float:
    """Beside what errors are seen: 1, or of a gradient the root mean square. It is a sum of terms of that size, and a
    unit of `out`'s last place, in which two forward passes may differ, changes each of them."""
    if name not in _GRADIENTS:
        return 1.0
    with mx.stream(mx.cpu):
        finite = mx.where(mx.isnan(expected), 0, expected)
        return float(mx.sqrt(mx.mean(finite * finite)))


def error_of(kernel: str, kind: Kind, rounds: bool) -> float:
    """Of out or of a gradient, before it is rounded. Where probabilities are rounded once to 16 bits, each is off by up
    to half of what two numbers differ, and so may out be; a gradient's P and dS are."""
    eps = float(mx.finfo(kind.dtype).eps)
    if "backward" in kernel:
        return max(_GRADIENT_ERROR, 8 * eps if rounds else eps)
    return max(ERROR, eps / 2) if rounds and kernel.startswith("cuda_prefill") and not kind.bits else ERROR


def lengths_of(kind: Kind, kernel: str = "") -> Lengths:
    """Lengths of queries and keys to check, as pairs."""
    if kind.query_len <= _ext.few_queries:
        return [(kind.query_len, keys) for keys in FEW_KEYS]
    sharing = [_ext.checked_sharing] if kernel.startswith("cuda_prefill") else []
    return [*_ext.checked_lengths, *sharing]


def cases(kind: Kind, lengths: Lengths) -> Iterator[Case]:
    """Calls of the kind, whose arrays are contiguous."""
    # Sequences and heads are few where blocks are to share keys: more blocks would leave no multiprocessor idle.
    few: dict[tuple[int, int], Any] = {_ext.checked_sharing: {"batch": 1, "kv_heads": 1}}
    for query_len, key_len in lengths:
        drawn_call = drawn(kind, query_len, key_len, **few.get((query_len, key_len), {}))
        yield Case(f"{query_len} queries, {key_len} keys", drawn_call, LAYOUTS)
    if any(name in HIDES for name in kind.given):
        for pair in {lengths[0], *(pair for pair in lengths if pair in few)}:
            yield Case("NaN in hidden keys", drawn(kind, *pair, hidden_nan=True, **few.get(pair, {})), LAYOUTS[:1])


def difference(got: mx.array, expected: mx.array, error: float = ERROR, size: float = 1.0) -> str:
    """How `got` is not `expected`, which is float32, or a number within the error of it, rounded; empty if it is.
    The error is relative, to `size` where numbers are smaller."""
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
    """The same call in float32, as far as it is not quantised."""
    return _with_rows(arguments, lambda x: x.astype(mx.float32))


# How the elements of an array of rows lie in memory.
LAYOUTS = ("contiguous", "strided", "misaligned")


def laid_out(arguments: Named, layout: str) -> Named:
    """The same call, whose query, and key and value if they are not quantised, lie in another way."""

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
