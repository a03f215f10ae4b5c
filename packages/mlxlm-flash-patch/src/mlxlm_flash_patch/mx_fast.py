"""The replacement for `mx.fast.scaled_dot_product_attention`, which almost all MLX programs call for attention."""

from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
from flashattn_core.contest import mlx_attention

from .router import Function, active, attend, flash_or, is_active, plain_call

# Other libraries' functions that are running now. Such a function may call the patch's, which would call it again.
_running: ContextVar[tuple[Any, ...]] = ContextVar("mlxlm_flash_patch: functions that are being called", default=())
MISSING: Any = object()  # an argument that was not given: MLX then raises its own error


def flash_instead_of(original: Function) -> Function:
    """A function with MLX's signature. `original`: MLX's own, or the one that another library has put in its place."""

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
            return _flash_or(original, q, k, v, others, scale=scale, mask=mask, sinks=sinks, **more)
        if out is False:  # MLX's own is faster
            return _call(original, (q, k, v), scale=scale, mask=mask, sinks=sinks)
        return out

    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def _flash_or(original: Function, q: Any, k: Any, v: Any, others: tuple[Any, ...], **options: Any) -> mx.array:
    def from_before() -> mx.array:
        if isinstance(k, mx.array) and k.ndim == 4 and k.shape[1] == 0 and is_active():
            # MLX's own function divides by the number of heads, which ends the process.
            raise ValueError("[scaled_dot_product_attention] key has 0 heads, expected at least 1")
        return _call(original, (q, k, v, *others), **options)

    whose = "MLX's own" if original is mlx_attention else "another library's"
    return flash_or(from_before, lambda: _attend(q, k, v, others, **options), whose)


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
    """Ignores `force_fused`: flash attention always fuses. Raises TypeError for arguments of another release of MLX."""
    if others or later or scale is None:
        raise TypeError(f"flash attention does not support the arguments {', '.join(later) or 'of this call'}")
    with nullcontext() if stream is None else mx.stream(stream):
        return attend(q, k, v, float(scale), mask, sinks)


def _call(original: Function, arrays: tuple[Any, ...], **options: Any) -> mx.array:
    """Calls `original` with only the arguments that were given: another library's wrapper may not accept the others."""
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
        with active(False):  # if another library's function calls the patch's, the call must not count twice
            return original(*arrays, **given)
    finally:
        _running.reset(token)
