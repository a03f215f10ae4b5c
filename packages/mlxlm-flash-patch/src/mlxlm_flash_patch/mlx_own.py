"""MLX's own attention function, which the patch replaces, and to which it leaves calls."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def is_mlx_attention(function: Any) -> bool:
    """Whether `function` is MLX's own attention. Another library's function may have its names, but not its type."""
    names = (getattr(function, "__module__", None), getattr(function, "__name__", None))
    return type(function).__module__ == "nanobind" and names == ("mlx.core.fast", "scaled_dot_product_attention")


def _find() -> Callable[..., mx.array]:
    """MLX's own attention, also if another library has replaced it. If that library dropped it, the library's own."""
    current: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention
    return current if is_mlx_attention(current) else next(filter(is_mlx_attention, gc.get_objects()), current)


mlx_attention = _find()  # found before the patch replaces it
