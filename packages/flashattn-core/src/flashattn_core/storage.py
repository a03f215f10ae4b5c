"""Appends rows to a quantised cache on CUDA, with the bits that MLX's own operations give."""

import warnings
from collections.abc import Sequence

import mlx.core as mx

from . import _ext

Rows = tuple[mx.array, ...]  # weights, scales and biases
_has_mlxs_bits = dict[tuple[str, mx.Dtype, int, int], bool]()  # by device, dtype, group size and bits


def append(
    keys: Sequence[mx.array], values: Sequence[mx.array], new: Rows, offset: int, group_size: int, bits: int
) -> tuple[Rows, Rows] | None:
    """Quantises new keys and values, and does `array[..., offset:end, :] = rows` for each array of the cache.

    Returns keys and values up to `end`. Returns None, and changes nothing, if only MLX's own operations can do this.
    """
    if not mx.cuda.is_available() or mx.default_device().type != mx.gpu:
        return None
    key = str(mx.default_device()), new[0].dtype, group_size, bits
    if not _has_mlxs_bits.get(key, True) or (key not in _has_mlxs_bits and not _passes(key)):
        return None
    try:
        read = _ext.append_rows(*keys, *values, *new, offset, group_size, bits)
    except TypeError:  # another library's cache has other arrays
        return None
    return None if read is None else (tuple(read[:3]), tuple(read[3:]))


def _passes(key: tuple[str, mx.Dtype, int, int]) -> bool:
    """Compares the kernel with mx.quantize() on this GPU, before its first use."""
    from .check import KernelWarning, when_to_check  # imported here, because the CPU's calls never need it
    from .check.compare import NO_MEMORY

    _, dtype, group_size, bits = key
    try:
        wrong = None if when_to_check() == "never" else _difference(dtype, group_size, bits)
    except ValueError:  # FLASHATTN_CHECK has no valid value, which attention warns of
        return False
    except RuntimeError as error:
        if NO_MEMORY.search(str(error)):  # this says nothing about the kernel
            return False
        wrong = str(error)  # the program does not compile
    if wrong == "":  # while a function is traced, or for bits that the kernel does not know
        return False
    _has_mlxs_bits[key] = wrong is None
    if wrong:
        warnings.warn(f"cuda_append fails its check and is not used: {wrong}", KernelWarning, stacklevel=3)
    return wrong is None


def _difference(dtype: mx.Dtype, group_size: int, bits: int) -> str | None:
    """What the kernel does wrong, in place and where it copies, or None. "" means that it could not run."""
    # Rows of zeros, of any numbers, and of numbers of one sign.
    rows = mx.random.normal((3, 1, 16, 256), key=mx.random.key(0)) * mx.arange(16)[:, None]
    rows = mx.concatenate([rows, mx.abs(rows), -mx.abs(rows)], axis=1).astype(dtype)
    quantised = mx.quantize(rows, group_size=group_size, bits=bits)
    expected = (*quantised, *quantised)
    for is_held in (False, True):
        stored = [mx.ones((3, 3, 41, x.shape[-1]), x.dtype) for x in expected]
        mx.eval(stored)
        held = [x[:] for x in stored] if is_held else []
        mx.eval(held)
        read = _ext.append_rows(*stored, rows, rows, 20, group_size, bits)
        if read is None:
            return ""
        same = (mx.array_equal(x[..., 20:, :], y) for x, y in zip(read, expected, strict=True))
        others = (rows for x in (*stored, *held) for rows in (x[..., :20, :], x[..., 36:, :]))
        if not all(same) or not all(mx.all(rows == 1) for rows in others):
            return "its bits are not MLX's"
    return None
