"""Whether a GPU's kernel computes what the CPU's does, on small inputs of a call's kind.

What a kernel meets only when it runs comes in all its forms: tiles that are full and tiles that are not, a chunk of the
keys and many, rows whose elements lie apart or that begin anywhere, NaN in keys that no row sees.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import _ext
from ._ext import NoKernelError
from .attention import flash_attention, quantized_flash_attention
from .masks import And, Causal, KeyRange, Mask, SlidingWindow, Tree
from .plan import Device, max_head_dim, plan

# Tensor cores cut off sums, and other orders of a sum round it in other ways.
ERROR = 1e-5

_BATCH, _KV_HEADS, _WINDOW, _SOFTCAP = 2, 2, 21, 5.0
_FEW_KEYS = (90, 2400)  # a chunk; more chunks than are merged at once
_PROMPT = 100  # queries

_NO_MEMORY = re.compile("out of memory|unable to allocate|out_of_memory", re.IGNORECASE)

_GRADIENTS, _GRADIENT_ERROR = ("dq", "dk", "dv", "dsinks"), 3e-5  # sums over all rows of a group

Attention = Callable[..., tuple[mx.array, ...]]  # out and lse, or gradients, of flash_attention's arguments
Lengths = Sequence[tuple[int, int]]
Named = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What kernels are compiled for: a call without its lengths, batch and numbers.

    `given`: the optional inputs that it has, by their names in csrc/call/inputs.def, and their dtypes; None for a flag.
    """

    dtype: mx.Dtype
    head_dim: int
    value_dim: int
    group: int  # query heads of a key/value head
    query_len: int
    given: Mapping[str, mx.Dtype | None] = field(default_factory=dict)
    bits: int = 0  # of quantised keys and values; 0: they are not
    group_size: int = 0


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
    kind = Kind(*arguments.kind())
    if "backward" in kernel:
        wrong = gradient_failure(kind, partial(_gradients, stream=stream))
    else:
        on_gpu = partial(_attend, kernel=kernel, stream=stream)
        wrong = failure(kind, on_gpu, partial(_attend, stream=mx.cpu), error=error_of(kernel, kind))
    if not wrong:
        return ""
    where = f"{mx.device_info(stream.device)['device_name']}, mlx {version('mlx')}"
    wrong = f"{kernel} fails its check on {where}: {wrong}"
    if report := _ext.keep("failed", wrong, ""):
        wrong += f". Please send {report}"
    warnings.warn(wrong, KernelWarning, stacklevel=2)
    return wrong


def of_backend(backend: Device) -> Iterator[tuple[str, int, str]]:
    """Asks each kernel for calls as models make them. Yields its name, how many kinds of calls, and what is wrong.

    A GPU's kernel is checked then, unless FLASHATTN_CHECK is "never"; if it is "always", again.
    """
    stream = mx.default_stream(mx.cpu if backend == "cpu" else mx.gpu)
    for kernel in _ext.stats():
        if not kernel.startswith(backend) or kernel.endswith("_dkv"):  # which _dq stands for
            continue
        count, wrong = 0, ""
        for kind in kinds_of_models():
            for query_len in (_PROMPT, 1):
                call = _call(replace(kind, query_len=query_len), query_len, _FEW_KEYS[0])
                if not _covers(kernel, backend, call):
                    continue
                count += 1
                try:
                    if "backward" in kernel:
                        _gradients(**call, stream=stream)
                    else:
                        _attend(**call, kernel=kernel, stream=stream)
                except NoKernelError as error:
                    wrong = wrong or str(error).removeprefix("[flash_attention] ")
                break
        yield kernel, count, wrong


def _covers(kernel: str, backend: Device, call: Named) -> bool:
    if "backward" in kernel:
        return "bits" not in call and call["query"].shape[-1] <= max_head_dim(backend, gradient=True)
    return plan(**call, device=backend, kernel=kernel).kernel is not None


def remembered() -> tuple[Counter[str], list[Path]]:
    """Of checks before: how many kinds of calls passed, by device and software; and the files that say what failed."""
    passed: Counter[str] = Counter()
    for file in _files("checked"):
        lines = file.read_text(errors="replace").splitlines()
        passed[lines[1] if len(lines) > 1 else "what cannot be read"] += 1  # behind the sums that guard it
    return passed, _files("failed")


def _files(folder: str) -> list[Path]:
    caches = _ext.cache_folder()
    return sorted(Path(caches, folder).glob("[0-9]*")) if caches else []


def kinds_of_models() -> Iterator[Kind]:
    """Each dtype with three head sizes and with padding; gpt-oss's and gemma's layers; quantised caches. Of prompts."""
    causal: dict[str, mx.Dtype | None] = {"causal": None}
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        for dim in (64, 128, 256):
            yield Kind(dtype, dim, dim, 4, _PROMPT, causal)
        yield Kind(dtype, 128, 128, 4, _PROMPT, causal | {"key_start": mx.int32})
    for dim, more in ((64, {"sinks": mx.bfloat16}), (256, {}), (256, {"softcap": None})):
        yield Kind(mx.bfloat16, dim, dim, 4, _PROMPT, causal | {"window": None} | more)
    stored = ("key_scales", "key_biases", "value_scales", "value_biases")
    for bits in (4, 8):
        yield Kind(mx.bfloat16, 128, 128, 4, _PROMPT, causal | dict.fromkeys(stored, mx.bfloat16), bits, group_size=64)


def _attend(*, bits: int = 0, **arguments: Any) -> tuple[mx.array, mx.array]:
    if bits:
        return quantized_flash_attention(**arguments, bits=bits, return_lse=True)
    return flash_attention(**arguments, return_lse=True)


def _gradients(*, stream: Any, **arguments: Any) -> tuple[mx.array, ...]:
    """Of query, key, value, and sinks if there are some; what comes back are large numbers, so that they are, too."""
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


def gradient_failure(kind: Kind, gradients: Attention, lengths: Lengths | None = None) -> str:
    """What is wrong with `gradients` for calls of the kind, beside the CPU's of the same dtype; empty if nothing is."""

    def on_cpu(**arguments: Any) -> tuple[mx.array, ...]:
        rows = _with_rows(arguments, lambda x: x.astype(kind.dtype))  # which failure() has in float32
        with mx.stream(mx.cpu):
            return tuple(x.astype(mx.float32) for x in _gradients(**rows, stream=mx.cpu))

    error = max(_GRADIENT_ERROR, float(mx.finfo(kind.dtype).eps))
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
                if _NO_MEMORY.search(str(raised)):
                    raise MemoryError(f"no memory to check a kernel: {raised}") from raised
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


def error_of(kernel: str, kind: Kind) -> float:
    """Of out, before it is rounded: some kernels round probabilities to 16 bits, by half of what two numbers differ."""
    return float(mx.finfo(kind.dtype).eps) / 2 if kernel.endswith("_rounded") else ERROR


def lengths_of(kind: Kind) -> Lengths:
    """Of queries and keys."""
    return (
        [(kind.query_len, keys) for keys in _FEW_KEYS] if kind.query_len <= _ext.few_queries else _ext.checked_lengths
    )


def cases(kind: Kind, lengths: Lengths) -> Iterator[Case]:
    """Calls of the kind, whose arrays are contiguous."""
    for query_len, key_len in lengths:
        yield Case(f"{query_len} queries, {key_len} keys", _call(kind, query_len, key_len), LAYOUTS)
    if any(name in _HIDES for name in kind.given):
        yield Case("NaN in hidden keys", _call(kind, *lengths[0], hidden_nan=True), LAYOUTS[:1])


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
LAYOUTS = ("contiguous", "apart", "begun anywhere")


def laid_out(arguments: Named, layout: str) -> Named:
    """The same call, whose query, and key and value if they are not quantised, lie in another way."""

    def laid(x: mx.array) -> mx.array:
        if layout == "apart":
            return mx.repeat(x, 2, axis=-1)[..., ::2]
        if layout == "begun anywhere":
            return mx.concatenate([x[..., :1], x], axis=-1)[..., 1:]
        return x

    return _with_rows(arguments, laid)


def _with_rows(arguments: Named, change: Callable[[mx.array], mx.array]) -> Named:
    rows = [name for name in ("query", "key", "value") if isinstance(arguments[name], mx.array)]
    with mx.stream(mx.cpu):
        changed = {name: change(arguments[name]) for name in rows}
        mx.eval(changed)
    return {**arguments, **changed}


# Inputs that hide a key from every row, or from all but the last.
_HIDES = ("causal", "key_start", "key_stop", "visible", "bias")


def _call(kind: Kind, query_len: int, key_len: int, hidden_nan: bool = False) -> Named:
    given = kind.given
    with mx.stream(mx.cpu):
        keys = iter(mx.random.split(mx.random.key(query_len), 16))

        def numbers(*shape: int, dtype: mx.Dtype = kind.dtype) -> mx.array:
            return mx.random.uniform(-1.7, 1.7, shape, key=next(keys)).astype(dtype)  # of variance 1, and quickly drawn

        heads = _KV_HEADS * kind.group
        query, key, value = (
            numbers(_BATCH, *shape)
            for shape in (
                (heads, query_len, kind.head_dim),
                (_KV_HEADS, key_len, kind.head_dim),
                (_KV_HEADS, key_len, kind.value_dim),
            )
        )
        if hidden_nan:
            at_the_beginning = "key_start" in given or "window" in given
            hidden = mx.arange(key_len)[:, None] == (0 if at_the_beginning else key_len - 1)
            key, value = (mx.where(hidden, mx.nan, x).astype(kind.dtype) for x in (key, value))
        call: Named = {"query": query, "key": key, "value": value}
        if kind.bits:
            how: Named = {"bits": kind.bits, "group_size": kind.group_size}
            for name in ("key", "value"):
                call[name] = mx.quantize(call[name].astype(_dtype(given, "key_scales")), **how)
            call |= how
        mask = _mask(given, query_len, key_len, numbers, next(keys))
        if mask is not None:
            call["mask"] = mask
        if "softcap" in given:
            call["softcap"] = _SOFTCAP
        # Small slopes, so that scores are: rounding one of hundreds is more than the error that is allowed.
        for name, most in (("sinks", 1), ("alibi_slopes", 1 / 16)):
            if name in given:
                call[name] = mx.abs(numbers(heads, dtype=_dtype(given, name))) * most
        mx.eval(call)
        return call


def _mask(
    given: Mapping[str, mx.Dtype | None],
    query_len: int,
    key_len: int,
    numbers: Callable[..., mx.array],
    random: mx.array,
) -> Mask | None:
    scores = (_BATCH, 1, query_len, key_len)
    parts: list[Any] = []
    if "window" in given:
        # Of many queries each sees a few tiles; a step's keys are still cut into chunks.
        parts.append(SlidingWindow(_WINDOW if query_len > _ext.few_queries else key_len * 5 // 6))
    elif "causal" in given:
        parts.append(Causal())
    if "key_start" in given or "key_stop" in given:
        stop = key_len - mx.array([1, 8]) if "key_stop" in given else None
        parts.append(KeyRange(mx.array([1, 6]), stop))
    if "tree" in given:
        nodes = min(query_len, 5)
        parts.append(Tree(mx.tri(nodes, dtype=mx.float32) * (numbers(_BATCH, nodes, nodes) < 1) > 0))
    seen = (mx.arange(key_len) > 0) & (mx.arange(key_len) < key_len - 1)
    if "visible" in given:
        parts.append((mx.random.uniform(shape=scores, key=random) < 0.7) & seen)
    if "bias" in given:
        parts.append(mx.where(seen, numbers(*scores), -mx.inf).astype(_dtype(given, "bias")))
    return And(tuple(parts)) if parts else None


def _dtype(given: Mapping[str, mx.Dtype | None], name: str) -> mx.Dtype:
    dtype = given[name]
    assert dtype is not None, f"{name} is a flag"
    return dtype
