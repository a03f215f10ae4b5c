"""The replacement for `mx.fast.scaled_dot_product_attention`, which almost all MLX programs call for attention."""

from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from .router import Function, attend, flash_or, is_active, plain_call

MISSING: Any = object()  # an argument that the caller did not give. _call() omits it, so MLX raises its own error


def flash_instead_of(original: Function) -> Function:
    """Makes the function that replaces MLX's own, which is `original`, and has the same parameters."""

    def scaled_dot_product_attention(
        q: Any = MISSING,
        k: Any = MISSING,
        v: Any = MISSING,
        *others: Any,
        scale: Any = MISSING,
        mask: Any = None,
        sinks: Any = None,
        **more: Any,
    ) -> Any:
        out = None if others or more else plain_call(q, k, v, scale, mask, sinks)
        if out is None:
            return _flash_or(original, (q, k, v, *others), scale=scale, mask=mask, sinks=sinks, **more)
        return out

    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def _flash_or(original: Function, arrays: tuple[Any, ...], **options: Any) -> mx.array:
    def mlx_own() -> mx.array:
        key = arrays[1]
        if isinstance(key, mx.array) and key.ndim == 4 and key.shape[1] == 0 and is_active():
            # MLX's own function would divide by key's number of heads, and a division by 0 ends the process.
            raise ValueError("[scaled_dot_product_attention] key has 0 heads, expected at least 1")
        return _call(original, arrays, **options)

    return flash_or(mlx_own, lambda: _attend(arrays, **options), "MLX's own")


def _attend(
    arrays: Any, scale: Any, mask: Any, sinks: Any, force_fused: bool = False, stream: Any = None, **later: Any
) -> mx.array:
    """Computes a call with the arguments of MLX's function. Raises TypeError for arguments that it does not know.

    Ignores `force_fused`, because flash attention is always fused.
    """
    q, k, v, *others = arrays
    if others or later or not isinstance(force_fused, bool):
        raise TypeError(f"flash attention does not support the arguments {', '.join(later) or 'of this call'}")
    with nullcontext() if stream is None else mx.stream(stream):
        return attend(q, k, v, scale, mask, sinks)


def _call(original: Function, arrays: tuple[Any, ...], **options: Any) -> mx.array:
    """Calls `original` with only the arguments that the caller gave, because MLX's errors list all that they got."""
    arrays = tuple(array for array in arrays if array is not MISSING)
    given = {
        name: value
        for name, value in options.items()
        if value is not MISSING and (value is not None or name not in ("mask", "sinks"))
    }
    return original(*arrays, **given)
