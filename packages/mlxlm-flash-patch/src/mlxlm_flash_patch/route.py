"""One call's way: flash attention, or mlx-lm's own function with the reason counted, never silently."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from flashattn_core import NoKernelError, flash_attention, is_tracing, quantized_flash_attention

from .described_masks import description_of

Attention = Callable[..., mx.array]

# While a function is traced, mx.grad, mx.vmap and mx.compile cannot be told apart.
TRACED_ON_GPU = "traced by mx.grad, mx.vmap or mx.compile: no gradient on a GPU for a head_dim over 256"
TRACED_QUANTISED = "a quantised KV cache under mx.grad, mx.vmap or mx.compile: flash attention has no gradient there"
TRACED_MASK = "an additive mask that mx.grad, mx.vmap or mx.compile traces: flash attention has no gradient of masks"
MAX_GPU_GRADIENT_DIM = 256
MAX_HEAD_DIM = 512  # flash_attention() takes more for bad input, mlx-lm's own attention does not


class FlashFallbackWarning(UserWarning):
    """A call went to mlx-lm's own attention; the text says why. Given once for each reason."""


class FlashFallbackError(RuntimeError):
    """With strict=True: a call would have gone to mlx-lm's own attention; the text says why."""


@dataclass
class Route:
    """What patch.py decides and a call reads: whether the way is open, how strict, and the way back."""

    original: Attention
    open: bool = False
    strict: bool = False
    fallbacks: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


def _no_original(*_: Any, **__: Any) -> mx.array:
    raise RuntimeError("the route was called before mlx-lm's function was known")  # patch.py sets it first


route = Route(_no_original)


def routed_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """What enable() puts in the place of mlx-lm's function.

    After disable() it passes every call on: a wrapper that another library put around it, or a module that
    sys.modules does not list, may still hold it.
    """
    return attend(queries, keys, values, cache, scale, mask, sinks)


def instance_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """What patch_model() makes one model call, whether or not enable() is in force."""
    return attend(queries, keys, values, cache, scale, mask, sinks, always=True)


def reason_not_to(
    queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any, sinks: mx.array | None
) -> str | None:
    """Why this call cannot be flash attention, as far as it can be told beforehand; None when it can."""
    if _is_quantised(cache):
        # Weights, scales, biases. The scales have the dtype that the keys had.
        traced = is_tracing(queries) or (isinstance(mask, mx.array) and is_tracing(mask))
        return TRACED_QUANTISED if traced else _dtype_reason(_common_dtype(queries, keys[1], values[1]))
    head_dim, value_dim = queries.shape[-1], values.shape[-1]
    if (
        max(head_dim, value_dim) > MAX_GPU_GRADIENT_DIM
        and mx.default_device() == mx.gpu
        and is_tracing(*(x for x in (queries, keys, values, mask, sinks) if isinstance(x, mx.array)))
    ):
        return TRACED_ON_GPU
    if isinstance(mask, mx.array) and mx.issubdtype(mask.dtype, mx.floating) and is_tracing(mask):
        return TRACED_MASK
    if head_dim > MAX_HEAD_DIM or value_dim > MAX_HEAD_DIM:
        return f"head_dim over {MAX_HEAD_DIM}"
    return _dtype_reason(_common_dtype(queries, keys, values))


def _is_quantised(cache: Any) -> bool:
    return hasattr(cache, "bits")  # mlx-lm's own test: keys and values are then tuples


def _common_dtype(queries: mx.array, keys: mx.array, values: mx.array) -> mx.Dtype:
    """What MLX's attention casts the three to: some models compute queries and keys in float32, and values not."""
    dtype = queries.dtype
    if keys.dtype == dtype and values.dtype == dtype:
        return dtype
    return mx.result_type(queries, keys, values)


def _dtype_reason(dtype: mx.Dtype) -> str | None:
    if dtype != mx.bfloat16 and dtype != mx.float16 and dtype != mx.float32:
        return f"dtype {str(dtype).removeprefix('mlx.core.')}"
    return None


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    *,
    softcap: float | None = None,
    own: Callable[[], mx.array] | None = None,
    always: bool = False,
) -> mx.array:
    """Flash attention, or what the model would have done without it: `own()`, or mlx-lm's function where it is None.

    `always`: also while the route is not open, as patch_model() wants it.
    """
    if always or route.open:
        reason = reason_not_to(queries, keys, values, cache, mask, sinks)
        if reason is None:
            try:
                return _flash(queries, keys, values, cache, scale, mask, sinks, softcap)
            except NoKernelError as error:
                reason = str(error)
        _note_fallback(reason)
    return own() if own else route.original(queries, keys, values, cache, scale, mask, sinks)


def _flash(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array:
    quantised = _is_quantised(cache)
    if isinstance(mask, mx.array):
        mask = description_of(mask, queries, (keys[0] if quantised else keys).shape[-2])
    if not quantised:
        dtype = _common_dtype(queries, keys, values)
        queries, keys, values = (x if x.dtype == dtype else x.astype(dtype) for x in (queries, keys, values))
        return flash_attention(queries, keys, values, scale, mask, softcap=softcap, sinks=sinks)
    return quantized_flash_attention(
        queries.astype(_common_dtype(queries, keys[1], values[1])),
        keys,
        values,
        scale,
        mask,
        group_size=cache.group_size,
        bits=cache.bits,
        softcap=softcap,
        sinks=sinks,
    )


def _note_fallback(reason: str) -> None:
    with route.lock:
        route.fallbacks[reason] += 1
        first = route.fallbacks[reason] == 1
    if route.strict:
        raise FlashFallbackError(f"strict: this call would have gone to mlx-lm's own attention: {reason}")
    if first:
        message = f"not flash attention but mlx-lm's own: {reason} (said once, every call is counted)"
        # Points at the model's line: _note_fallback, attend and the function that is put in place lie between.
        warnings.warn(message, FlashFallbackWarning, stacklevel=4)
