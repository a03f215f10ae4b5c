"""The replacement for `mx.fast.scaled_dot_product_attention`, which almost all MLX programs call for attention."""

from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
from flashattn_core.contest import mlx_attention

from .router import Function, active, attend, flash_or, is_active, plain_call

# Functions of other libraries that the patch has called and that still run. If such a function calls the patch, _call()
# calls MLX's own function. If _call() called the library's function again, the calls would never end.
_running: ContextVar[tuple[Any, ...]] = ContextVar("mlxlm_flash_patch: functions that are being called", default=())
MISSING: Any = object()  # an argument that the caller did not give. _call() omits it, so MLX raises its own error


def flash_instead_of(original: Function) -> Function:
    """Makes the function that replaces `original`, which is MLX's own function or another library's.

    The new function has the parameters of MLX's function.
    """

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
        out = None
        if scale is not None and not (others or more):
            out = plain_call(q, k, v, scale, mask, sinks)
        if out is None:
            return _flash_or(original, (q, k, v, *others), scale=scale, mask=mask, sinks=sinks, **more)
        if out is False:  # MLX's own attention is faster
            return _call(original, (q, k, v), scale=scale, mask=mask, sinks=sinks)
        return out

    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def _flash_or(original: Function, arrays: tuple[Any, ...], **options: Any) -> mx.array:
    def from_before() -> mx.array:
        key = arrays[1]
        if isinstance(key, mx.array) and key.ndim == 4 and key.shape[1] == 0 and is_active():
            # MLX's own function would divide by key's number of heads, and a division by 0 ends the process.
            raise ValueError("[scaled_dot_product_attention] key has 0 heads, expected at least 1")
        return _call(original, arrays, **options)

    whose = "MLX's own" if original is mlx_attention else "another library's"
    return flash_or(from_before, lambda: _attend(arrays, **options), whose)


def _attend(
    arrays: Any, scale: Any, mask: Any, sinks: Any, force_fused: bool = False, stream: Any = None, **later: Any
) -> mx.array | None:
    """Computes a call with the arguments of MLX's function. Raises TypeError for arguments that it does not know.

    Ignores `force_fused`, because flash attention is always fused.
    """
    q, k, v, *others = arrays
    if others or later or scale is None:
        raise TypeError(f"flash attention does not support the arguments {', '.join(later) or 'of this call'}")
    with nullcontext() if stream is None else mx.stream(stream):
        return attend(q, k, v, scale, mask, sinks)


def _call(original: Function, arrays: tuple[Any, ...], **options: Any) -> mx.array:
    """Calls `original` with only the arguments that the caller gave. Another library's function may lack `sinks`."""
    arrays = tuple(array for array in arrays if array is not MISSING)
    given = {
        name: value
        for name, value in options.items()
        if value is not MISSING and (value is not None or name not in ("mask", "sinks"))
    }
    around = _running.get()
    if original is mlx_attention or any(original is each for each in around):
        return mlx_attention(*arrays, **given)
    token = _running.set((*around, original))
    try:
        with active(False):  # `original` may call the patch's function, which must not count the call twice
            return original(*arrays, **given)
    finally:
        _running.reset(token)
