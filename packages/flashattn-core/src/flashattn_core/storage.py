"""Appends rows to a quantised cache on CUDA, with the bits that MLX's own operations give."""

import warnings
from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from . import _ext

Rows = tuple[mx.array, ...]  # weights, scales and biases


def append(
    keys: Sequence[mx.array], values: Sequence[mx.array], new: Rows, offset: int, group_size: int, bits: int
) -> tuple[Rows, Rows] | None:
    """Quantises new keys and values, and does `array[..., offset:end, :] = rows` for each array of the cache.

    Returns keys and values up to `end`. Returns None, and changes nothing, if only MLX's own operations can do this.
    """
    if not _has_mlxs_bits(new[0].dtype, group_size, bits):
        return None
    try:
        read = _ext.append_rows(*keys, *values, *new, offset, group_size, bits)
    except TypeError:  # another library's cache has other arrays
        return None
    return None if read is None else (tuple(read[:3]), tuple(read[3:]))


@cache
def _has_mlxs_bits(dtype: mx.Dtype, group_size: int, bits: int) -> bool:
    """Compares the kernel with mx.quantize() on this GPU, before its first use."""
    if not mx.cuda.is_available():
        return False
    from .check import KernelWarning, when_to_check  # imported here, because the CPU's calls never need it

    if when_to_check() == "never":
        return True
    try:
        with mx.stream(mx.gpu):
            # Rows of zeros, of any numbers, and of numbers of one sign.
            rows = mx.random.normal((3, 1, 16, 256), key=mx.random.key(0)) * mx.arange(16)[:, None]
            rows = mx.concatenate([rows, mx.abs(rows), -mx.abs(rows)], axis=1).astype(dtype)
            expected = mx.quantize(rows, group_size=group_size, bits=bits)
            stored = [mx.ones((3, 3, 40, x.shape[-1]), x.dtype) for x in (*expected, *expected)]
            mx.eval(stored)
            read = _ext.append_rows(*stored, rows, rows, 20, group_size, bits)
            if read is None:
                return False
            same = (mx.array_equal(x[..., 20:, :], y) for x, y in zip(read, (*expected, *expected), strict=True))
            wrong = "" if all(same) and all(mx.all(x[..., :20, :] == 1) for x in stored) else "its bits are not MLX's"
    except RuntimeError as error:  # the program does not compile
        wrong = str(error)
    if wrong:
        warnings.warn(f"cuda_append fails its check and is not used: {wrong}", KernelWarning, stacklevel=3)
    return not wrong
