"""The replacement for `mx.fast.scaled_dot_product_attention`, which almost all MLX programs call for attention."""

from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from .router import Function, attend, flash_or, plain_call

MISSING: Any = object()  # an argument that the caller did not give, so that MLX raises its own error


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
            arrays = [x for x in (q, k, v, *others) if x is not MISSING]
            options = {"scale": scale} if scale is not MISSING else {}
            options |= {name: x for name, x in (("mask", mask), ("sinks", sinks)) if x is not None} | more
            return flash_or(lambda: original(*arrays, **options), lambda: _flash(*arrays, **options), "MLX's own")
        return out

    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def _flash(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: Any,
    mask: Any = None,
    sinks: Any = None,
    stream: Any = None,
    force_fused: Any = False,
) -> mx.array:
    """Computes a call with the arguments of MLX's function. Raises TypeError for arguments that it does not know.

    Ignores `force_fused`, because flash attention is always fused.
    """
    if not isinstance(force_fused, bool):
        raise TypeError("force_fused is no bool")
    with nullcontext() if stream is None else mx.stream(stream):
        return attend(q, k, v, scale, mask, sinks)
