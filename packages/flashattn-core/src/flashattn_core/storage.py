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
    """Quantises new = (keys, values), and does `array[..., offset:end, :] = rows` for each array of the cache.

    Returns keys and values up to `end`. Returns None, and changes nothing, if only MLX's own operations can do this.
    """
    if bits not in (4, 8) or not mx.cuda.is_available() or mx.default_device().type != mx.gpu:
        return None
    try:
        if not _has_mlxs_bits(str(mx.default_device()), new[0].dtype, group_size, bits):
            return None
        return _ext.append_rows(keys, values, new[0], new[1], offset, group_size, bits)
    except (MemoryError, TypeError, ValueError):  # nobody can check the kernel now, or the cache has other arrays
        return None


@cache
def _has_mlxs_bits(device: str, dtype: mx.Dtype, group_size: int, bits: int) -> bool:
    """Compares the kernel with mx.quantize() on this GPU, before its first use.

    Raises ValueError if FLASHATTN_CHECK is invalid or the kernel cannot run, and MemoryError.
    """
    from .check import KernelWarning, when_to_check  # imported here, because the CPU's calls never need it
    from .check.compare import NO_MEMORY

    try:
        wrong = "" if when_to_check() == "never" else _difference(dtype, group_size, bits)
    except RuntimeError as error:
        wrong = str(error)  # the program does not compile
        if NO_MEMORY.search(wrong):  # this says nothing about the kernel
            raise MemoryError from error
    if wrong:
        warnings.warn(f"cuda_append fails its check and is not used: {wrong}", KernelWarning, stacklevel=3)
    return not wrong


def _difference(dtype: mx.Dtype, group_size: int, bits: int) -> str:
    """What the kernel does wrong, in place and where it copies, or ""."""
    # Rows of zeros, of any numbers, and of numbers of one sign.
    rows = mx.random.normal((3, 1, 16, 256), key=mx.random.key(0)) * mx.arange(16)[:, None]
    rows = mx.concatenate([rows, mx.abs(rows), -mx.abs(rows)], axis=1).astype(dtype)
    quantised = mx.quantize(rows, group_size=group_size, bits=bits)
    expected = (*quantised, *quantised)
    for is_held in (False, True):
        stored = [mx.ones((3, 3, 41, x.shape[-1]), x.dtype) for x in expected]
        held = [x[:] for x in stored] if is_held else []
        mx.eval(stored, held)
        read = _ext.append_rows(stored[:3], stored[3:], rows, rows, 20, group_size, bits)
        if read is None:  # while a function is traced
            raise ValueError
        same = (mx.array_equal(x[..., 20:, :], y) for x, y in zip((*read[0], *read[1]), expected, strict=True))
        others = (rows for x in (*stored, *held) for rows in (x[..., :20, :], x[..., 36:, :]))
        if not all(same) or not all(mx.all(rows == 1) for rows in others):
            return "its bits are not MLX's"
    return ""
