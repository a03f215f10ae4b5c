"""Compares a GPU kernel's results with the CPU's on small random inputs, for all calls that need the same programs.

Such calls may have full or partial tiles, one or many chunks of keys, strided or misaligned rows, and NaN in
hidden keys. So the inputs have all of these.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from .. import _ext
from ..arguments import lowered
from .drawn import HIDES, Named, drawn

# The allowed relative error. Tensor cores truncate sums, and kernels add in different orders.
ERROR = 1e-5

# Numbers of keys to check with few queries. Kernels read 90 keys in one chunk or a few, and split 2400 keys into more
# chunks than they merge at once.
FEW_KEYS = (90, 2400)

NO_MEMORY = re.compile("out of memory|unable to allocate|out_of_memory", re.IGNORECASE)

_OUTPUTS, _GRADIENTS = ("out", "lse", "exact_out"), ("dq", "dk", "dv", "dsinks")
_ON_CPU, _GRADIENT_ON_CPU = (_ext.Variant(kernel) for kernel in (_ext.Kernel.cpu_prefill, _ext.Kernel.cpu_backward))

Attention = Callable[..., tuple[mx.array, ...]]  # flash_attention's arguments -> (out, lse) or gradients
Lengths = Sequence[tuple[int, int]]


def of_call(call: _ext.Call, variant: _ext.Variant, stream: mx.Stream) -> str:
    """Compares a kernel with the CPU's for calls like this one. Returns the error, or ""."""
    how: Named = {"stream": stream, "variant": variant, "precision": "input" if call.rounds else "float32"}
    if "backward" in variant.kernel.name:
        return gradient_failure(call, partial(_gradients, **how), variant=variant)
    exact_out = _ext.saves_exact_out(call, _ext.backend_of(stream.device))
    attend, on_cpu = partial(_attend, **how, exact_out=exact_out), partial(_attend, stream=mx.cpu, exact_out=exact_out)
    return failure(call, attend, on_cpu, lengths_of(call, variant), variant)


def _attend(
    *, stream: Any, variant: _ext.Variant = _ON_CPU, exact_out: bool = False, **arguments: Any
) -> tuple[mx.array, ...]:
    """(out, lse), or (out, lse, out before it is rounded) if exact_out."""
    outputs: tuple[mx.array, ...] = _ext.unchecked_attention(lowered(**arguments), variant, True, stream, exact_out)
    return outputs


def _gradients(*, stream: Any, **arguments: Any) -> tuple[mx.array, ...]:
    """Gradients of query, key, value, and of sinks if given."""
    names = [name for name in ("query", "key", "value", "sinks") if name in arguments]

    def outputs(*changed: mx.array) -> tuple[mx.array, ...]:
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
    call: _ext.Call, gradients: Attention, lengths: Lengths | None = None, variant: _ext.Variant = _GRADIENT_ON_CPU
) -> str:
    """Compares the function `gradients` with the CPU's gradients in call.dtype. Returns the error, or ""."""

    def on_cpu(**arguments: Any) -> tuple[mx.array, ...]:
        rows = with_rows(arguments, lambda x: x.astype(call.dtype))  # failure() passes float32
        with mx.stream(mx.cpu):
            return tuple(x.astype(mx.float32) for x in _gradients(**rows, stream=mx.cpu))

    return failure(call, gradients, on_cpu, lengths, variant)


def failure(
    call: _ext.Call,
    attention: Attention,
    on_cpu: Attention,
    lengths: Lengths | None = None,
    variant: _ext.Variant = _ON_CPU,
) -> str:
    """Compares `attention` with `on_cpu` for such calls. Returns the first error, or "".

    lengths: pairs of a number of queries and a number of keys. None means lengths_of(call).
    variant: says whether the results are gradients, and how large their errors may be, see error_of().

    Raises MemoryError if there is too little memory for the check. This says nothing about the kernel.
    """
    names = _GRADIENTS if "backward" in variant.kernel.name else _OUTPUTS
    for case, arguments, layouts in cases(call, lengths or lengths_of(call)):
        expected = on_cpu(**with_rows(arguments, lambda x: x.astype(mx.float32)))
        for layout in layouts:
            try:
                got = attention(**with_rows(arguments, LAYOUTS[layout]))
                mx.eval(got)
            except (RuntimeError, ValueError) as raised:
                if NO_MEMORY.search(str(raised)):
                    raise MemoryError(f"there is no memory to check a kernel: {raised}") from raised
                return f"{case}, {layout}: {raised}"
            for name, found, wanted in zip(names, got, expected, strict=False):  # some have no exact_out or dsinks
                if wrong := difference(found, wanted, error_of(name, variant, call), size_of(name, wanted)):
                    return f"{case}, {layout}: {name} {wrong}"
    return ""


def size_of(name: str, expected: mx.array) -> float:
    """The number to which errors are relative: 1 for out and lse, and the root mean square of a gradient. An element of
    a gradient may be near 0 and still be a sum of terms of that size. Each term has an error of its own, and with
    precision="input" those of rounding P, dS and `out`."""
    if name not in _GRADIENTS:
        return 1.0
    with mx.stream(mx.cpu):
        finite = mx.where(mx.isnan(expected), 0, expected)
        return float(mx.sqrt(mx.mean(finite * finite)))


def error_of(name: str, variant: _ext.Variant, call: _ext.Call) -> float:
    """The allowed error of a result before it is rounded to its dtype, relative to the larger of size_of() and the
    expected number."""
    eps = float(mx.finfo(call.dtype).eps)
    if name in _GRADIENTS:  # sums over all rows; with precision="input", P, dS and the saved out are rounded
        return max(3e-5, 8 * eps if variant.rounds else eps)
    if name == "exact_out":  # 1/8 of the rounding error that exact_out keeps away from gradients
        return max(ERROR, eps / 16)
    if not variant.rounds:
        return ERROR
    if name == "lse":  # rounding quantised keys changes scores by about eps / 5, and one of thousands by nearly eps
        return max(ERROR, eps) if call.bits else ERROR
    # Rounding a probability to 16 bits changes it, and therefore out, by up to eps / 2. Rounding the elements of
    # quantised keys and values may change out as much again, each.
    return max(ERROR, eps * (1.5 if call.bits else 0.5))


def lengths_of(call: _ext.Call, variant: _ext.Variant = _ON_CPU) -> Lengths:
    """Pairs of a number of queries and a number of keys to check the kernel with."""
    backend = variant.kernel.name.partition("_")[0]
    if call.query_len <= _ext.max_exact_queries(backend):
        return [(call.query_len, keys) for keys in FEW_KEYS]
    sharing = [_ext.checked_sharing] if variant.kernel is _ext.Kernel.cuda_prefill else []
    return [*_ext.checked_lengths, *sharing]


def cases(call: _ext.Call, lengths: Lengths) -> Iterator[tuple[str, Named, Sequence[str]]]:
    """Draws such calls with these lengths. Yields a name, contiguous arguments, and the LAYOUTS to check them in."""
    # cuda_prefill splits keys only in a last wave that would leave multiprocessors idle. So the call that checks this
    # has one sequence and one key/value head.
    few: dict[tuple[int, int], Any] = {_ext.checked_sharing: {"batch": 1, "kv_heads": 1}}
    for pair in lengths:
        yield "{} queries, {} keys".format(*pair), drawn(call, *pair, **few.get(pair, {})), list(LAYOUTS)
    if any(name in HIDES for name in call.given):
        for pair in {lengths[0], *(pair for pair in lengths if pair in few)}:
            yield "NaN in hidden keys", drawn(call, *pair, hidden_nan=True, **few.get(pair, {})), ["contiguous"]


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


# Memory layouts, each with the function that brings an array into it.
LAYOUTS: dict[str, Callable[[mx.array], mx.array]] = {
    "contiguous": lambda x: x,
    "strided": lambda x: mx.repeat(x, 2, axis=-1)[..., ::2],
    "misaligned": lambda x: mx.concatenate([x[..., :1], x], axis=-1)[..., 1:],
}


def with_rows(arguments: Named, change: Callable[[mx.array], mx.array]) -> Named:
    """The same call with query, and key and value unless they are quantised, changed by this function."""
    rows = [name for name in ("query", "key", "value") if isinstance(arguments[name], mx.array)]
    with mx.stream(mx.cpu):
        changed = {name: change(arguments[name]) for name in rows}
        mx.eval(changed)
    return {**arguments, **changed}
