"""Times each kernel, and MLX's own attention, on one kind of call on this GPU.

These contestants take turns on random inputs with the shapes of a real call. If the call is too large, first its keys
and queries are halved, then its batch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from . import _ext
from .arguments import lowered
from .check import NO_MEMORY
from .drawn import Kind, Named, drawn
from .masks import And, Causal, KeyRange, SlidingWindow

MLX = "mlx"  # the name of the contestant that is MLX's own attention
Times = dict[str, list[float]]  # contestant -> seconds per call, one number for each result of _ways()
ROWS = ("query", "key", "value")


def is_mlx_attention(function: Any) -> bool:
    """Whether `function` is MLX's own attention. Another library's function may have its names, but not its type."""
    names = (getattr(function, "__module__", None), getattr(function, "__name__", None))
    return type(function).__module__ == "nanobind" and names == ("mlx.core.fast", "scaled_dot_product_attention")


def _find_mlx_attention() -> Callable[..., mx.array]:
    """MLX's own attention, also if another library has replaced it. If that library dropped it, the library's own."""
    current: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention
    return current if is_mlx_attention(current) else next(filter(is_mlx_attention, gc.get_objects()), current)


mlx_attention = _find_mlx_attention()  # saved before mlxlm_flash_patch replaces it

_MOST_WORK = 1e11  # multiply-adds of a trial call: a few milliseconds on a laptop's GPU
_MOST_WORK_ON_CUDA = 1e12  # the same for CUDA: a few milliseconds on a data-centre GPU
_MOST_BYTES = 2**29  # the size of a trial call's arrays
_TRIALS, _TRIAL_SECONDS, _WARM_UP = 5, 0.004, 16  # a trial repeats short calls until they take _TRIAL_SECONDS
_SLOW_SECONDS = 0.04  # a contestant slower than this is timed only once
_MOST_REPEATS = 512
_MOST_SECONDS = 0.3  # after this time, a contest begins no more trials
# MLX's own attention is timed only for calls whose optional inputs are all among these. Either MLX's function does not
# take the others, or a trial cannot reproduce the call's mask.
_FUSED_IN_MLX = {"causal", "window", "key_start", "key_stop", "sinks"}

Calls = Callable[[int], Any]  # count -> the lazy outputs of that many calls of a contestant


def in_words(call: _ext.Arguments) -> str:
    """Describes a call. Lengths and the batch size are rounded up to powers of two, but not small numbers of
    queries. Calls with the same description are timed only once."""
    kind, (batch, heads, kv_heads, key_len, window) = Kind(*call.kind()), call.sizes()
    query_len = kind.query_len if kind.query_len <= _ext.few_queries else _power_of_two(kind.query_len)
    window = _power_of_two(min(window, key_len))
    key_len, batch = _power_of_two(key_len), _power_of_two(batch)
    dtype = str(kind.dtype).removeprefix("mlx.core.")
    dims = f"{kind.head_dim}" if kind.head_dim == kind.value_dim else f"{kind.head_dim}, {kind.value_dim}"
    parts = [f"{dtype} {heads}/{kv_heads}x{dims}", f"{query_len} x {key_len}"]
    parts += [f"batch of {batch}"] * (batch > 1) + [f"window {window}"] * (window > 0)
    parts += sorted(name for name in kind.given if name not in ("window", "bits", "group_size"))
    parts += [f"{kind.bits} bits in groups of {kind.group_size}"] * (kind.bits > 0)
    parts += ["with its gradient"] * call.is_traced + ["rounded once"] * call.rounds
    return ", ".join(parts)


def mlx_is_fused(call: _ext.Arguments, stream: mx.Stream) -> bool:
    """Whether MLX has a fused kernel for such calls. If it has none, MLX raises an error because of `force_fused`.

    MLX's unfused attention writes the score matrix to memory, and is never preferred to a kernel. This function asks
    about the forward pass even if the gradient is wanted, because MLX's choice for the forward pass holds for both.
    """
    kind = Kind(*call.kind())
    if not _FUSED_IN_MLX.issuperset(kind.given):
        return False
    batch, heads, kv_heads, key_len, _ = call.sizes()
    with mx.stream(stream):
        query = mx.zeros((batch, heads, kind.query_len, kind.head_dim), kind.dtype)
        key = mx.zeros((batch, kv_heads, key_len, kind.head_dim), kind.dtype)
        value = mx.zeros((batch, kv_heads, key_len, kind.value_dim), kind.dtype)
        sinks = mx.zeros((heads,), kind.dtype) if "sinks" in kind.given else None
        mask: Any = "causal" if "causal" in kind.given else None
        if not {"window", "key_start", "key_stop"}.isdisjoint(kind.given):
            mask = mx.zeros((batch, 1, kind.query_len, key_len), mx.bool_)
        try:
            mlx_attention(query, key, value, scale=1.0, mask=mask, sinks=sinks, force_fused=True)
        except (RuntimeError, ValueError):
            return False
    return True


def times(call: _ext.Arguments, contestants: Sequence[str], stream: mx.Stream) -> Times:
    """Median seconds per call for each contestant; empty if none can be timed, or if memory is short.

    A contestant that raises is left out. Ctrl-C raises as usual.
    """
    try:
        with mx.stream(stream):
            trial = _trial_call(call, stream)
            return _in_turns({name: _ways(name, call, trial, stream) for name in contestants})
    except (MemoryError, RuntimeError, ValueError):
        return {}


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length() if number else 0


def _trial_call(call: _ext.Arguments, stream: mx.Stream) -> Named:
    kind, (batch, _, kv_heads, key_len, window) = Kind(*call.kind()), call.sizes()
    query_len = kind.query_len
    heads, columns = kv_heads * kind.group, kind.head_dim + kind.value_dim
    most_work = _MOST_WORK_ON_CUDA if _ext.backend_of(stream.device) == "cuda" else _MOST_WORK

    def is_large() -> bool:
        work = batch * heads * query_len * min(window or key_len, key_len) * columns
        size = batch * (heads * query_len + kv_heads * key_len) * columns * kind.dtype.size
        return work > most_work or size > _MOST_BYTES

    while is_large() and (query_len > 128 or key_len > 1024 or batch > 1):
        if key_len > max(query_len, 1024):  # halves only the keys, because fewer queries keep less of the GPU busy
            key_len //= 2
        elif query_len > 128 or key_len > 1024:
            query_len, key_len = query_len // 2 if query_len > 128 else query_len, max(1, key_len // 2)
        else:
            batch = batch // 2
    return drawn(kind, query_len, key_len, batch=batch, kv_heads=kv_heads, window=window, stream=stream)


def _ways(name: str, call: _ext.Arguments, trial: Named, stream: mx.Stream) -> list[Calls]:
    """Returns one or two functions that make `count` calls of a contestant. The first makes independent calls, which
    may overlap. The second (never for gradients) passes the output of each call to the next call as query, because the
    layers of a model also wait for each other."""
    query, key, value = rows = [trial[name] for name in ROWS]
    scale = float(query.shape[-1]) ** -0.5
    if name == MLX:
        mask, sinks = _mask_for_mlx(trial), trial.get("sinks")

        def attend(query: mx.array, key: mx.array = key, value: mx.array = value) -> Any:
            return mlx_attention(query, key, value, scale=scale, mask=mask, sinks=sinks, stream=stream)
    else:
        how: Named = {**trial, "scale": scale, "kernel": name, "precision": "input" if call.rounds else "float32"}
        prepared = lowered(**how)

        def attend(query: mx.array, key: mx.array = key, value: mx.array = value) -> Any:
            if call.is_traced:
                return _ext.attention_by_table(
                    lowered(**how | dict(zip(ROWS, (query, key, value), strict=True))), False, stream
                )
            return _ext.attention_by_table(prepared, False, stream, query)

    def independent(count: int) -> Any:
        return [attend(query) for _ in range(count)]

    def in_a_chain(count: int) -> Any:
        out = query
        for _ in range(count):
            out = attend(out)
        return out

    kind = Kind(*call.kind())
    if call.is_traced and not kind.bits:
        cotangent = mx.random.uniform(-1, 1, (*query.shape[:-1], kind.value_dim), key=mx.random.key(0))
        mx.eval(cotangent := cotangent.astype(query.dtype))
        return [lambda count: [mx.vjp(attend, rows, [cotangent]) for _ in range(count)]]
    return [independent, in_a_chain] if kind.head_dim == kind.value_dim else [independent]


def _mask_for_mlx(trial: Named) -> Any:
    """Converts the trial's mask to the form that programs pass to MLX: None, "causal", or a bool array that all layers
    share."""
    mask, query, key = trial.get("mask"), trial["query"], trial["key"]
    parts = mask.parts if isinstance(mask, And) else [] if mask is None else [mask]
    if all(isinstance(part, Causal) for part in parts):
        return "causal" if parts else None
    query_len, key_len = query.shape[-2], key.shape[-2]
    at, keys = mx.arange(query_len)[:, None] + key_len - query_len, mx.arange(key_len)
    seen = mx.ones((query.shape[0], 1, query_len, key_len), mx.bool_)
    for part in parts:
        if isinstance(part, Causal | SlidingWindow):
            seen = seen & (keys <= at)
        if isinstance(part, SlidingWindow):
            seen = seen & (at - keys < part.window)
        if isinstance(part, KeyRange):
            seen = seen & (keys >= mx.array(part.start)[:, None, None, None])
            if part.stop is not None:
                seen = seen & (keys < mx.array(part.stop)[:, None, None, None])
    mx.eval(seen)
    return seen


def _in_turns(ways: dict[str, list[Calls]]) -> Times:
    from statistics import median  # not at the top of the file, where it adds 5 ms to every program's start

    once: dict[str, float] = {}
    for name, calls in ways.items():
        try:
            _seconds(calls[0], 1)  # the first call compiles the kernel
            once[name] = _seconds(calls[0], 1)
            if once[name] < _TRIAL_SECONDS:  # short, so many calls are timed in one evaluation
                once[name] = _seconds(calls[0], _WARM_UP) / _WARM_UP
        except (RuntimeError, ValueError) as error:
            if NO_MEMORY.search(str(error)):
                raise
    trials: dict[str, list[list[float]]] = {name: [[] for _ in ways[name]] for name in once}
    end = time.perf_counter() + _MOST_SECONDS
    for number in range(_TRIALS):
        for name in sorted(once, reverse=number % 2 == 1):
            if once[name] <= _SLOW_SECONDS and time.perf_counter() < end:
                repeats = max(1, min(_MOST_REPEATS, round(_TRIAL_SECONDS / once[name])))
                for way, seconds in zip(ways[name], trials[name], strict=True):
                    seconds.append(_seconds(way, repeats) / repeats)
    return {
        name: [float(f"{median(seconds or [once[name]]):.4g}") for seconds in each] for name, each in trials.items()
    }


def _seconds(calls: Calls, count: int) -> float:
    mx.synchronize()
    collects = gc.isenabled()
    gc.disable()
    try:
        began = time.perf_counter()
        mx.eval(calls(count))
        mx.synchronize()
        return time.perf_counter() - began
    finally:
        if collects:
            gc.enable()
