"""`mlxlm-flash tune` checks and times kernels in advance. Without it, the first calls of a model do so."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from flashattn_core import NoKernelError, _ext
from flashattn_core.arguments import lowered
from flashattn_core.contest import MLX, in_words
from flashattn_core.decide import decide
from flashattn_core.masks import Causal, KeyRange, Mask, SlidingWindow

from .patch import enabled, status
from .router import FlashFallbackWarning, observed


@dataclass(frozen=True)
class Call:
    """The sizes and options of one attention call."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    query_len: int
    key_len: int
    batch_size: int = 1
    window: int = 0  # how many keys a query sees; 0: no window
    softcap: bool = False
    sinks: bool = False
    padded: bool = False  # each sequence of the batch has its own range of keys
    bits: int = 0  # per element of keys and values; 0: not quantised

    def arguments(self) -> _ext.Arguments:
        """The call's arguments as the patch would pass them. Their arrays are lazy and never evaluated."""
        dtype, dim = getattr(mx, self.dtype), self.head_dim
        query = mx.zeros((self.batch_size, self.heads, self.query_len, dim), dtype)
        rows: Any = mx.zeros((self.batch_size, self.kv_heads, self.key_len, dim), dtype)
        mask: Mask | None = Causal() if self.query_len > 1 else None
        if self.window and self.window < self.key_len:
            mask = SlidingWindow(self.window)
        if self.padded:
            mask = (mask or Causal()) & KeyRange(mx.zeros(self.batch_size, mx.int32))
        storage: dict[str, Any] = {"bits": self.bits, "group_size": 64} if self.bits else {}
        if self.bits:
            rows = mx.quantize(rows, **storage)
        sinks = mx.zeros(self.heads, dtype) if self.sinks else None
        softcap = 50.0 if self.softcap else None
        return lowered(query, rows, rows, 1.0, mask, sinks=sinks, softcap=softcap, precision="input", **storage)


def _call_of(arguments: _ext.Arguments) -> Call:
    dtype, head_dim, _, _, query_len, given, bits, _ = arguments.kind()
    batch_size, heads, kv_heads, key_len, window = arguments.sizes()
    padded = any(name in given for name in ("key_start", "key_stop"))
    sizes = (heads, kv_heads, head_dim, query_len, key_len, batch_size, window)
    name = str(dtype).removeprefix("mlx.core.")
    return Call(name, *sizes, "softcap" in given, "sinks" in given, padded, bits)


# One line for each attention call: Qwen2.5 0.5B, 7B and a padded batch of 7B, Llama 3, gpt-oss with and without a
# window, gemma 3 with and without a window, gemma 2. calls() sets the lengths.
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
STORED_LENGTHS = ((1, 1024), (1, 8192), (1, 32768), (1024, 1024))  # for quantised caches


def calls(quick: bool) -> list[Call]:
    """The calls to time. With `quick`, there are fewer lengths, and float32 and quantised caches for one model only."""
    wanted = [_of_lengths(model, *lengths) for model in MODELS for lengths in (QUICK_LENGTHS if quick else LENGTHS)]
    qwen = [call for call in wanted if (call.heads, call.kv_heads, call.batch_size) == (14, 2, 1)]
    wanted += [replace(call, dtype="float32") for call in (qwen if quick else wanted) if not call.sinks]
    qwens = [_of_lengths(model, *lengths) for model in MODELS[:2] for lengths in STORED_LENGTHS]
    wanted += [replace(call, bits=bits) for call in (qwen if quick else qwens) for bits in (4, 8)]
    return list(dict.fromkeys(wanted))


def calls_of(model: str) -> list[Call]:
    """The calls to time for a model: the attention of all its layers. Raises what attention_of() raises."""
    seen, _ = attention_of(model)
    layers = dict.fromkeys(replace(call, query_len=1, key_len=1) for call in seen)
    if not layers:
        raise ValueError(f"{model} has no attention that flash attention can compute")
    return list(dict.fromkeys(_of_lengths(layer, *lengths) for layer in layers for lengths in LENGTHS))


def attention_of(name: str) -> tuple[list[Call], dict[str, int]]:
    """Builds a model and lets it read a prompt. Returns its flash attention calls, and its fallbacks: reason -> number.

    The model needs no weights, because its outputs are not evaluated. Only the checks of kernels evaluate attention.

    Args:
      name: a folder in mlx-lm's layout, or a hub id whose configuration is in the local hub cache.

    Raises:
      ValueError, OSError: there is no such configuration, or mlx-lm cannot build the model.
      PermissionError: (an OSError) the model has its own code, which this function does not run.
    """
    from mlx_lm.utils import load_model

    file = _configuration(name)
    if own := json.loads(file.read_text(encoding="utf-8")).get("model_file"):
        raise PermissionError(f"{name} brings its own code, {own}, which mlxlm-flash does not run")
    try:
        model, config = load_model(file.parent, lazy=True, strict=False)
    except (KeyError, TypeError, ValueError) as error:  # mlx-lm's errors for a bad configuration
        raise ValueError(f"mlx-lm cannot build a model from {name}: {error}") from error
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    model.set_dtype(getattr(mx, dtype, mx.bfloat16))
    seen: list[Call] = []
    with enabled(), observed(lambda arguments: seen.append(_call_of(arguments))), warnings.catch_warnings():
        warnings.simplefilter("ignore", FlashFallbackWarning)  # this function returns the reasons
        before = Counter(status().fallbacks)
        model(mx.zeros((1, 1 + _longest_window(config)), mx.int32))
        return seen, dict(Counter(status().fallbacks) - before)


def _configuration(model: str) -> Path:
    """The path of config.json, in a folder or in the local hub cache, without network. Raises ValueError or OSError."""
    if Path(model).is_dir():
        return Path(model, "config.json")
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")  # raises ValueError for an invalid id
    if not isinstance(found, str):
        raise ValueError(f"{model} is not a folder, and the local hub cache does not hold its config.json")
    return Path(found)


def _longest_window(config: dict[str, Any]) -> int:
    """The largest window, in tokens, in a configuration and those nested in it; 1 if there is none."""
    sizes = [_longest_window(value) for value in config.values() if isinstance(value, dict)]
    sizes += [value for name, value in config.items() if "window" in name and isinstance(value, int)]
    return max(sizes, default=1)


def _of_lengths(model: Call, query_len: int, key_len: int) -> Call:
    """`model` with these lengths. With a window there are fewer keys: mlx-lm's cache drops keys that no query sees."""
    seen = model.window - 1 + query_len if model.window else key_len
    return replace(model, query_len=query_len, key_len=min(seen, key_len))


def lines(wanted: Iterable[Call]) -> Iterator[str]:
    """Decides which kernel each call will run, and yields a line of text about it. Raises ValueError on a CPU."""
    if mx.default_device() == mx.cpu:
        raise ValueError("MLX's default device is a CPU, where there is nothing to time")
    for call in wanted:
        arguments = call.arguments()
        try:
            decision = decide(arguments)
        except NoKernelError as error:
            yield f"{in_words(arguments)}: {error}"
            continue
        ordered = sorted(decision.times.items(), key=lambda each: each[1][-1])
        times = ", ".join(f"{name} {1e6 * seconds[-1]:,.1f} µs" for name, seconds in ordered)
        taken = "MLX's own attention" if decision.left() else decision.kernel or decision.wrong
        yield f"{in_words(arguments)}: {taken}" + (f" ({times.replace(MLX + ' ', 'MLX ')})" if times else "")
