"""The replacement for `mx.fast.scaled_dot_product_attention`, which almost all MLX programs call for attention."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from .router import Function, attend, flash_or, is_active, plain_call

MISSING: Any = object()  # an argument that the caller did not give


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
        if out is not None:
            return out
        # MLX's errors list all that MLX got, so it gets only the arguments that the caller gave.
        arrays = [array for array in (q, k, v, *others) if array is not MISSING]
        options = {"scale": scale} if scale is not MISSING else {}
        options |= {name: array for name, array in (("mask", mask), ("sinks", sinks)) if array is not None} | more
        return flash_or(lambda: _call(original, arrays, options), lambda: _flash(*arrays, **options), "MLX's own")

    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def _call(original: Function, arrays: Sequence[Any], options: dict[str, Any]) -> mx.array:
    key = arrays[1] if len(arrays) > 1 else None
    if isinstance(key, mx.array) and key.ndim == 4 and key.shape[1] == 0 and is_active():
        # MLX's own function would divide by key's number of heads, and a division by 0 ends the process.
        raise ValueError("[scaled_dot_product_attention] key has 0 heads, expected at least 1")
    return original(*arrays, **options)


def _flash(
    *arrays: Any,
    scale: Any = None,
    mask: Any = None,
    sinks: Any = None,
    force_fused: bool = False,
    stream: Any = None,
    **later: Any,
) -> mx.array:
    """Computes a call with the arguments of MLX's function. Raises TypeError for arguments that it does not know.

    Ignores `force_fused`, because flash attention is always fused.
    """
    if len(arrays) != 3 or later or not isinstance(force_fused, bool):
        raise TypeError(f"flash attention does not support the arguments {', '.join(later) or 'of this call'}")
    with nullcontext() if stream is None else mx.stream(stream):
        return attend(*arrays, scale, mask, sinks)
