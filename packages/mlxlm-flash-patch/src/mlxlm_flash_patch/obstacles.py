"""Why a call cannot be flash attention, as far as it can be told before. What kernels take is the core's to say.

While a function is traced, mx.grad, mx.vmap and mx.compile cannot be told apart. A traced call may want a gradient.
"""

from functools import cache
from typing import Any

import flashattn_core
import mlx.core as mx
from flashattn_core import is_tracing
from flashattn_core.argument_types import describe

TRACED = "traced by mx.grad, mx.vmap or mx.compile: flash attention has no gradient"
DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def reason_not_to(
    queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any, sinks: mx.array | None
) -> str | None:
    """Why this call cannot be flash attention; None when it can. Queries are as :func:`in_one_dtype` gives them."""
    quantised, device = is_quantised(cache), mx.default_device().type
    head_dim = queries.shape[-1] if quantised else max(queries.shape[-1], values.shape[-1])
    if head_dim > (most := _max_head_dim(device, True, quantised)):
        if 0 < (forward := _max_head_dim(device, False, quantised)) < head_dim:
            return f"head_dim over {forward}"
        if traced(queries, keys, values, mask, sinks):
            here = f"here for a head_dim over {most}" if most else "here"
            return f"{TRACED} {'with a quantised KV cache' if quantised else here}"
    dtype = queries.dtype
    return None if dtype in DTYPES else f"dtype {str(dtype).removeprefix('mlx.core.')}"


@cache
def _max_head_dim(device: mx.DeviceType, gradient: bool, quantised: bool) -> int:
    """The most that a kernel takes on the default device, for the call or for its gradient; 0 where there is none."""
    return flashattn_core.max_head_dim(gradient=gradient, quantised=quantised)


def traced(*arguments: Any) -> bool:
    return is_tracing(*[x for x in arguments if isinstance(x, mx.array)])


def is_quantised(cache: Any) -> bool:
    return hasattr(cache, "bits")  # mlx-lm's own test: keys and values are then tuples


def check_storage(keys: Any, values: Any, cache: Any) -> None:
    """Raises ValueError unless keys and values are stored as the cache says. mlx-lm's own attention fails then, too."""
    quantised = is_quantised(cache)
    for name, given in (("keys", keys), ("values", values)):
        if quantised and isinstance(given, mx.array):
            expected = "(weights, scales, biases)"
            reason = f"the cache, {describe(cache)}, has an attribute 'bits', as quantised caches have"
        elif not quantised and isinstance(given, list | tuple):
            expected = "an array"
            reason = f"the cache, {describe(cache)}, has no attribute 'bits'"
            if cache is None:  # as attention is called that takes no cache
                reason = "this model's attention takes no quantised KV cache, so run it without --kv-bits"
        else:
            continue
        message = f"{name} are {describe(given)}, expected {expected}: {reason}"
        raise ValueError(f"[scaled_dot_product_attention] {message}")


def in_one_dtype(queries: mx.array, keys: Any, values: Any) -> tuple[mx.array, Any, Any]:
    """The three as MLX's attention casts them: some models compute queries and keys in float32, and values not.

    A quantised cache's tuples stay as they are; their scales, in the middle, have the dtype that the keys had.
    """
    quantised = not isinstance(keys, mx.array)
    key, value = (keys[1], values[1]) if quantised else (keys, values)
    dtype = queries.dtype
    if key.dtype == dtype and value.dtype == dtype:
        return queries, keys, values
    dtype = mx.result_type(queries, key, value)
    queries = queries.astype(dtype)
    return (queries, keys, values) if quantised else (queries, keys.astype(dtype), values.astype(dtype))
