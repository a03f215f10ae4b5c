"""Checks and converts the Python arguments of a call."""

from typing import Any, Literal, TypedDict

import mlx.core as mx

from . import _ext
from . import argument_types as types
from .masks import Mask, lower

_NOT_QUANTISED: Any = object()
_SMALLEST_SOFTCAP = 1e-20  # with a smaller softcap, scores / softcap could overflow float32

Quantized = tuple[mx.array, mx.array, mx.array]  # weights, scales, biases
MaskLike = Mask | mx.array | Literal["causal"] | None
Precision = Literal["float32", "input"]


class Options(TypedDict, total=False):
    """The keyword arguments of every call; :func:`flash_attention` says what they mean."""

    softcap: float | None
    sinks: mx.array | None
    alibi_slopes: mx.array | None
    kernel: str
    precision: Precision
    stream: Any


def lowered(
    query: mx.array,
    key: mx.array | Quantized,
    value: mx.array | Quantized,
    scale: float | None = None,
    mask: MaskLike = None,
    *,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    alibi_slopes: mx.array | None = None,
    kernel: str = "auto",
    precision: str = "float32",
    stream: Any = None,
    group_size: int = 0,
    bits: int = _NOT_QUANTISED,
) -> _ext.Arguments:
    """Converts the arguments to ``_ext.Arguments``. C++ checks shapes and dtypes later. Ignores `stream`.

    `bits`: bits per element of quantised keys and values; not given if key and value are arrays.
    """
    types.array("query", query)
    given: Any = lower(mask)  # holds only the arguments that are used, because each entry costs time
    given["kernel"] = kernel
    given["rounds"] = types.rounds(precision)
    for name, numbers in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if numbers is not None:
            given[name] = types.array(name, numbers)
    if bits is not _NOT_QUANTISED:
        for name, count in (("bits", bits), ("group_size", group_size)):
            given[name] = types.whole(f"[flash_attention] {name}", count, 1, types.INT32_MAX, "a whole number above 0")
        key, given["key_scales"], given["key_biases"] = _quantized("key", key)
        value, given["value_scales"], given["value_biases"] = _quantized("value", value)
    # The name becomes a std::string, which cannot hold surrogates, and part of an error's what(), which ends at a NUL.
    if not isinstance(kernel, str) or not kernel.isprintable() or len(kernel) > 100:
        raise ValueError(f"[flash_attention] kernel is {types.describe(kernel)}, expected 'auto' or a kernel's name")
    if scale is not None:
        given["scale"] = types.finite("scale", scale, "multiply query by the array, and pass scale=1.0")
    if softcap is not None:
        given["softcap"] = softcap = types.finite("softcap", softcap, "compute it outside the function that MLX traces")
        if softcap < _SMALLEST_SOFTCAP:
            raise ValueError(f"[flash_attention] softcap is {softcap}, expected at least {_SMALLEST_SOFTCAP}")
    return _ext.Arguments(query, types.array("key", key), types.array("value", value), **given)


lowered.__qualname__ = "flash_attention"  # so that TypeError for an unknown keyword names the public function


def _quantized(name: str, given: object) -> Quantized:
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise ValueError(f"[flash_attention] {name} is {types.describe(given)}, expected (weights, scales, biases)")
    parts = zip(("weights", "scales", "biases"), given, strict=True)
    weights, scales, biases = (types.array(f"{name} ({part})", array) for part, array in parts)
    return weights, scales, biases
