"""Why a call cannot be flash attention, as far as it can be told before. What kernels take is the core's to say.

While a function is traced, mx.grad, mx.vmap and mx.compile cannot be told apart. A traced call may want a gradient.
"""

from functools import cache
from typing import Any

import flashattn_core
import mlx.core as mx
from flashattn_core import is_tracing

TRACED = "traced by mx.grad, mx.vmap or mx.compile: flash attention has no gradient"
DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def reason_not_to(
    queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any, sinks: mx.array | None
) -> str | None:
    """Why this call cannot be flash attention; None when it can."""
    quantised = is_quantised(cache)
    head_dim = queries.shape[-1] if quantised else max(queries.shape[-1], values.shape[-1])
    if head_dim > (most := max_head_dim(gradient=True, quantised=quantised)):
        if 0 < (forward := max_head_dim(gradient=False, quantised=quantised)) < head_dim:
            return f"head_dim over {forward}"
        if _traced(queries, keys, values, mask, sinks):
            here = f"here for a head_dim over {most}" if most else "here"
            return f"{TRACED} {'with a quantised KV cache' if quantised else here}"
    if isinstance(mask, mx.array) and mx.issubdtype(mask.dtype, mx.floating) and is_tracing(mask):
        return f"{TRACED} of an additive mask"
    dtype = common_dtype(queries, keys, values)
    return None if dtype in DTYPES else f"dtype {str(dtype).removeprefix('mlx.core.')}"


def max_head_dim(*, gradient: bool, quantised: bool) -> int:
    """The most that a kernel takes on the default device, for the call or for its gradient; 0 where there is none."""
    return _max_head_dim(mx.default_device().type, gradient, quantised)


@cache
def _max_head_dim(device: mx.DeviceType, gradient: bool, quantised: bool) -> int:
    return flashattn_core.max_head_dim(gradient=gradient, quantised=quantised)


def _traced(*arguments: Any) -> bool:
    return is_tracing(*(x for x in arguments if isinstance(x, mx.array)))


def is_quantised(cache: Any) -> bool:
    return hasattr(cache, "bits")  # mlx-lm's own test: keys and values are then tuples


def common_dtype(queries: mx.array, keys: Any, values: Any) -> mx.Dtype:
    """What MLX's attention casts the three to: some models compute queries and keys in float32, and values not.

    A quantised cache's tuples have their scales in the middle, with the dtype that the keys had.
    """
    if not isinstance(keys, mx.array):
        keys, values = keys[1], values[1]
    dtype = queries.dtype
    if keys.dtype == dtype and values.dtype == dtype:
        return dtype
    return mx.result_type(queries, keys, values)
