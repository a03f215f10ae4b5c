"""What stands in place of `mx.fast.scaled_dot_product_attention`, through which almost all of MLX's programs attend."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
from flashattn_core.contest import mlx_attention

from .router import active, attend, fall_back, is_active, plain_call

Function = Callable[..., Any]
MISSING: Any = object()  # an argument that was not given: MLX has its own word for that


def flash_instead_of(original: Function) -> Function:
    """Takes what MLX's function takes. `original` is MLX's own, or what another library has put in its place."""

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
        out, reason = None, None
        if scale is not None and not (others or more):
            out = plain_call(q, k, v, scale, mask, sinks)
        if out is None and is_active():
            try:
                out = _attend(q, k, v, others, scale, mask, sinks, **more)
            except (AttributeError, TypeError, ValueError) as error:
                if isinstance(k, mx.array) and k.ndim == 4 and k.shape[1] == 0:
                    raise  # MLX's own function divides by the number of heads, which ends the process
                reason = str(error)
        if out is None or out is False:  # off, or MLX's own is faster, takes what ours does not, or has its own error
            out = _call(original, (q, k, v, *others), scale=scale, mask=mask, sinks=sinks, **more)
            if reason is not None:
                fall_back(reason)
        return out

    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def _attend(
    q: Any,
    k: Any,
    v: Any,
    others: Any,
    scale: Any,
    mask: Any,
    sinks: Any,
    force_fused: bool = False,
    stream: Any = None,
    **later: Any,
) -> mx.array | None:
    """Flash attention is always fused. Raises TypeError for what another release of MLX may take."""
    if others or later or scale is None:
        raise TypeError(f"this version does not know what to do with {', '.join(later) or 'such arguments'}")
    with nullcontext() if stream is None else mx.stream(stream):
        return attend(q, k, v, float(scale), mask, sinks)


def _call(original: Function, arrays: tuple[Any, ...], **options: Any) -> Any:
    """Calls the function from before with what was given. An older wrapper around MLX's need not know the rest."""
    arrays = tuple(array for array in arrays if array is not MISSING)
    given = {
        name: value
        for name, value in options.items()
        if value is not MISSING and (value is not None or name not in ("mask", "sinks"))
    }
    if original is mlx_attention:
        return original(*arrays, **given)
    with active(False):  # a function of the patch that lies within another library's must not count the call again
        return original(*arrays, **given)
