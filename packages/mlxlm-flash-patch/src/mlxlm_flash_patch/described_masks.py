"""Finds small descriptions (flashattn_core.masks) for the L*S mask arrays that mlx-lm builds.

mlx-lm's functions still return arrays, and `_remembered` maps each array to its description. If attention reads the
description, MLX never evaluates the array, which then takes no memory. If a model computes a new mask from such an
array, the new mask has no description, and attention reads the new mask.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from flashattn_core import _ext, array_id
from flashattn_core.argument_types import describe
from flashattn_core.masks import Causal, KeyRange, Mask, SlidingWindow

Function = Callable[..., Any]
Describe = Callable[..., Mask | None]


class _Remembered(NamedTuple):
    description: Mask
    lengths: tuple[int, int]  # the L and S for which the description holds
    batch: tuple[int, ...] | None  # the batch shape for which the description holds; None: any
    array: mx.array  # while this array lives, no other array gets the mask's id


_remembered: dict[int, _Remembered] = {}  # key: array_id(), which changes when a program writes to the array


def description_of(mask: Any, query: mx.array, key_len: int) -> Any:
    """The description of `mask` if it has one for these lengths and this batch shape, else `mask` itself.

    An evaluated mask counts as an array, because a program may have written to its memory through a NumPy view.
    Raises TypeError for a description, because MLX's function and mlx-lm's take none.
    """
    if not isinstance(mask, mx.array):
        if isinstance(mask, Mask):
            what = f"mask is {describe(mask)}, expected None, 'causal' or an array"
            raise TypeError(f"[scaled_dot_product_attention] {what}")
        return mask
    known = _remembered.get(array_id(mask))
    if known is None or known.lengths != (query.shape[-2], key_len) or not _ext.is_unevaluated(mask):
        return mask
    return known.description if known.batch is None or known.batch == query.shape[:-3] else mask


def describing(original: Function, describe: Describe) -> Function:
    """Wraps `original`, which makes masks for mlx-lm. Remembers what `describe` returns for the same arguments."""

    @functools.wraps(original)
    def make_and_describe(*args: Any, **kwargs: Any) -> Any:
        mask = original(*args, **kwargs)
        if isinstance(mask, mx.array):
            # mlx-lm accepts windows of 0 or 8.5 keys. flashattn_core.masks raises ValueError for them. Such a mask gets
            # no description, so attention reads the array.
            with contextlib.suppress(ValueError):
                description = describe(*args, **kwargs)
                if description is not None:
                    _remember(mask, description)
        return mask

    return make_and_describe


def causal(
    N: int,
    offset: int = 0,
    window_size: int | None = None,
    right_padding: mx.array | None = None,
    left_padding: mx.array | None = None,
) -> Mask:
    """Describes the mask of mlx-lm's create_causal_mask()."""
    mask: Mask = Causal() if window_size is None else SlidingWindow(window_size)
    if left_padding is None and right_padding is None:
        return mask
    stop = None if right_padding is None else offset + N - right_padding
    return mask & KeyRange(0 if left_padding is None else _as_it_is_now(left_padding), stop)


def rotating(self: Any, N: int, window_size: int | None = None, return_array: bool = False) -> Mask | None:
    """Describes the mask of RotatingKVCache.make_mask() for one query. For more queries, causal() describes it."""
    if N > 1 or window_size is None:
        return None
    # The newest key is at stop - 1, and older ones are before it. A window that wraps around the end of the cache is
    # two ranges, which KeyRange cannot describe.
    stop = 1 + (self._idx if self._idx < self.max_size else 0)
    return KeyRange(stop - window_size, stop) if window_size <= stop <= self.offset + 1 else None


def batch_rotating(self: Any, N: int, window_size: int | None = None, return_array: bool = False) -> Mask | None:
    """Describes the mask of BatchRotatingKVCache.make_mask()."""
    if N == 1 and (self.rotated or self._idx >= self.max_size):
        # In each row, the visible keys may wrap around the cache's end. One KeyRange cannot describe that. Attention
        # reads the array instead, which is small: (B, 1, 1, S).
        return None
    trimmed = max(0, self._idx - self.max_size + 1) if N > 1 else 0  # keys that update_and_fetch() will drop
    return SlidingWindow(window_size or self.max_size) & KeyRange(self.left_padding - trimmed)


def _remember(mask: mx.array, description: Mask) -> None:
    key, shape = array_id(mask), mask.shape
    lengths = (shape[-2] if mask.ndim > 1 else 1, shape[-1])
    batch = shape[:-3] if mask.ndim > 3 else None
    _remembered[key] = _Remembered(description, lengths, batch, _as_it_is_now(mask))
    weakref.finalize(mask, _remembered.pop, key, None).atexit = False


def _as_it_is_now(array: mx.array) -> mx.array:
    """A new Python object with the array's present value. mlx-lm's caches change the old object in place."""
    return array.astype(array.dtype)
