"""`mlxlm-flash tune`: how long the attention of real models takes each kernel here, and mlx-lm's own."""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import click
import flashattn_core
import mlx.core as mx
from flashattn_core import _ext, tuned
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
from flashattn_core.tuned import MLX, Call, Measured
from mlx_lm.models import base
from mlx_lm.utils import _get_classes

from .faster import mlx_lm_cannot
from .patch import enabled
from .route import observed

# Qwen2.5, also a padded batch, Llama 3, gpt-oss, gemma 2 and 3. A window's layers take turns with plain ones.
MODELS = (
    Call("bfloat16", 14, 2, 64, 1, 1),
    Call("bfloat16", 28, 4, 128, 1, 1),
    Call("bfloat16", 28, 4, 128, 1, 1, batch_size=8, padded=True),
    Call("bfloat16", 32, 8, 128, 1, 1),
    Call("bfloat16", 64, 8, 64, 1, 1, window=128, sinks=True),
    Call("bfloat16", 64, 8, 64, 1, 1, sinks=True),
    Call("bfloat16", 8, 4, 256, 1, 1, window=1024),
    Call("bfloat16", 8, 4, 256, 1, 1),
    Call("bfloat16", 8, 4, 256, 1, 1, softcap=True),
)
LENGTHS = ((1, 128), (1, 1024), (1, 8192), (1, 32768), (8, 4096), (128, 128), (1024, 1024), (4096, 4096), (1024, 8192))
QUICK_LENGTHS = ((1, 1024), (1, 8192), (256, 256), (4096, 4096))
MOST_ON_CPU = 256 * 1024  # scores: beyond that MLX's own attention takes seconds
SOFTCAP, PADDING = 50.0, 9  # keys before the first sequence of a batch, twice as many before the next, and so on
STORED_LENGTHS = ((1, 1024), (1, 8192), (1, 32768), (1024, 1024))  # of quantised caches
TRIALS, TRIAL_SECONDS = 5, 0.02  # short calls are repeated until a trial lasts so long
SLOW_SECONDS = 0.3  # what takes so long has one trial
MOST_BYTES = 2**30  # of outputs, which live until all of a trial are done

Attention = Callable[[], mx.array]


def calls(quick: bool) -> list[Call]:
    """What is measured: with quick, some lengths, and one model alone in float32 and with a quantised cache."""
    wanted = [_of_lengths(model, *lengths) for model in MODELS for lengths in (QUICK_LENGTHS if quick else LENGTHS)]
    qwen = [call for call in wanted if (call.heads, call.kv_heads, call.batch_size) == (14, 2, 1)]
    wanted += [replace(call, dtype="float32") for call in (qwen if quick else wanted) if not call.sinks]
    qwens = [_of_lengths(model, *lengths) for model in MODELS[:2] for lengths in STORED_LENGTHS]
    wanted += [replace(call, bits=bits) for call in (qwen if quick else qwens) for bits in (4, 8)]
    most = MOST_ON_CPU if mx.default_device() == mx.cpu else inf
    return [call for call in dict.fromkeys(wanted) if call.query_len * call.key_len <= most]


def calls_of(config: dict[str, Any]) -> list[Call]:
    """What is measured for a model of this configuration: the attention of all of its layers.

    Raises ValueError where mlx-lm knows no such model, or none of its attention is what the patch takes.
    """
    model_class, arguments_class = _get_classes(config)  # what mlx-lm loads for a configuration is its own affair
    try:
        model = model_class(arguments_class.from_dict(config))  # its weights are never computed
    except TypeError as error:
        raise ValueError(f"mlx-lm makes no model of this configuration: {error}") from error
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    model.set_dtype(getattr(mx, dtype, mx.bfloat16))
    seen: list[Call] = []
    with enabled(), observed(lambda arguments: seen.append(tuned.call_of(arguments))):
        # Nothing of it is computed, but kernels may be checked.
        model(mx.zeros((1, 1 + _longest_window(config)), mx.int32))
    layers = dict.fromkeys(replace(call, query_len=1, key_len=1) for call in seen)
    if not layers:
        raise ValueError(f"{config['model_type']} has no attention that the patch takes")
    most = MOST_ON_CPU if mx.default_device() == mx.cpu else inf
    wanted = dict.fromkeys(_of_lengths(layer, *lengths) for layer in layers for lengths in LENGTHS)
    return [call for call in wanted if call.query_len * call.key_len <= most]


def _longest_window(config: dict[str, Any]) -> int:
    """In tokens, wherever a configuration has it; some have others within."""
    sizes = [_longest_window(value) for value in config.values() if isinstance(value, dict)]
    sizes += [value for name, value in config.items() if "window" in name and isinstance(value, int)]
    return max(sizes, default=1)


def _of_lengths(model: Call, query_len: int, key_len: int) -> Call:
    """mlx-lm's caches of layers with a window hold no more keys than some query sees."""
    seen = model.window - 1 + query_len if model.window else key_len
    return replace(model, query_len=query_len, key_len=min(seen, key_len))


def tune(wanted: Sequence[Call]) -> Path:
    """Measures these calls, and puts them into the table. What is done stays there, whatever ends this.

    Raises OSError or LookupError where the table cannot be written, ValueError where what is there is none.
    """
    device = mx.default_device()
    table = {measured.call: measured for measured in tuned.read(device)}
    path = tuned.write(table.values(), device)
    with click.progressbar(wanted, label="calls", file=sys.stderr, item_show_func=str) as calls:
        for call in calls:
            table[call] = measure(call)
            tuned.write(table.values(), device)
    return path


def measure(call: Call) -> Measured:
    """All that can compute the call take turns, after a warm-up each."""
    contestants: dict[str, Attention] = {}
    memory: dict[str, int] = {}
    trials: dict[str, list[float]] = {}
    repeats: dict[str, int] = {}
    for name, attend in _contestants(call):
        try:
            mx.eval(attend())  # compiles and checks
            memory[name] = _peak(attend)
        except (RuntimeError, ValueError) as error:
            if name != MLX:  # which does not take all of them
                click.echo(f"{call}: {name} is left out: {error}", err=True)
            continue
        contestants[name], trials[name], repeats[name] = attend, [], 1
        most = MOST_BYTES // attend().nbytes
        while (seconds := _seconds(attend, repeats[name])) < TRIAL_SECONDS and 2 * repeats[name] <= most:
            repeats[name] *= 2
        if seconds > SLOW_SECONDS:
            trials[name] = [seconds / repeats[name]] * TRIALS
    for number in range(TRIALS):
        for name in sorted(contestants, reverse=number % 2 == 1):
            if len(trials[name]) < TRIALS:
                trials[name].append(_seconds(contestants[name], repeats[name]) / repeats[name])
    return Measured(call, {name: float(f"{median(each):.4g}") for name, each in trials.items()}, memory)


def _contestants(call: Call) -> Iterator[tuple[str, Attention]]:
    dtype = getattr(mx, call.dtype)
    shapes = [(call.batch_size, call.heads, call.query_len, call.head_dim)]
    shapes += [(call.batch_size, call.kv_heads, call.key_len, call.head_dim)] * 2
    query, key, value = (mx.random.normal(shape, dtype, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    sinks = mx.zeros(call.heads, dtype) if call.sinks else None
    mask: Any = SlidingWindow(call.window) if call.window else Causal()
    if call.padded:
        mask &= KeyRange(_padding(call))
    scale = call.head_dim**-0.5
    stored: list[Any] = [mx.quantize(x, bits=call.bits) for x in (key, value)] if call.bits else [key, value]
    mx.eval(query, stored, sinks)
    options: dict[str, Any] = {"mask": mask, "scale": scale, "sinks": sinks}
    options["softcap"] = SOFTCAP if call.softcap else None
    if call.bits:
        options["bits"] = call.bits
    attention: Any = flashattn_core.quantized_flash_attention if call.bits else flashattn_core.flash_attention
    backend = _ext.backend_of(mx.default_device())
    covers = [
        kernel
        for kernel in _ext.kernels(backend)
        if not kernel.endswith("_rounded") and flashattn_core.plan(query, *stored, kernel=kernel, **options).kernel
    ]
    for kernel in covers:
        if not kernel.endswith("_rowwise") or len(covers) == 1:  # which is there for what no other takes
            yield kernel, partial(attention, query, *stored, kernel=kernel, **options)
    if not mlx_lm_cannot(query, call.bits > 0, sinks):
        yield MLX, partial(_mlx_lms_own, call, _mlx_lms_mask(call), query, stored, scale, sinks)


def _padding(call: Call) -> mx.array:
    """As mlx-lm's caches have it: hidden keys before each sequence."""
    return PADDING * (1 + mx.arange(call.batch_size))


def _mlx_lms_mask(call: Call) -> Any:
    """As a model makes it, once for its layers."""
    mask: Any = "causal" if call.query_len > 1 else None
    if call.padded or (call.window and call.window < call.key_len) or (mask and call.softcap):
        mask = base.create_causal_mask(
            call.query_len,
            call.key_len - call.query_len,
            window_size=call.window or None,
            left_padding=_padding(call) if call.padded else None,
        )
        mx.eval(mask)
    return mask


def _mlx_lms_own(
    call: Call, mask: Any, query: mx.array, stored: list[Any], scale: float, sinks: mx.array | None
) -> mx.array:
    """As a model's layer has it."""
    key, value = stored
    if call.softcap:
        return _gemma2s(query, key, value, scale, mask)
    if call.bits:  # which scales the query in place
        return base.quantized_scaled_dot_product_attention(query[:], key, value, scale, mask, bits=call.bits)
    return mx.fast.scaled_dot_product_attention(query, key, value, scale=scale, mask=mask, sinks=sinks)


def _gemma2s(query: mx.array, key: mx.array, value: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    """As mlx_lm.models.gemma2 writes it out."""
    grouped = mx.unflatten(query * scale, 1, (key.shape[1], -1))
    scores = mx.tanh(grouped @ key[:, :, None].swapaxes(-1, -2) / SOFTCAP) * SOFTCAP
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return (mx.softmax(scores, precise=True, axis=-1) @ value[:, :, None]).reshape(query.shape)


def _peak(attend: Attention) -> int:
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attend())
    return max(0, mx.get_peak_memory() - before)


def _seconds(attend: Attention, repeats: int) -> float:
    mx.synchronize()
    gc.disable()
    try:
        began = time.perf_counter()
        mx.eval([attend() for _ in range(repeats)])
        mx.synchronize()
        return time.perf_counter() - began
    finally:
        gc.enable()
