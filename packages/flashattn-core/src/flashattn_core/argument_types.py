"""Checks of Python arguments' types, and how messages name what came. Shapes and dtypes are checked in C++."""

from __future__ import annotations

import math
import operator
from typing import Any

import mlx.core as mx

INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38


def describe(given: object) -> str:
    """`given` in a few words. Only of what cannot fail or take long: another's repr() can, an array's evaluates it."""
    if isinstance(given, mx.array):
        return f"an array of {str(given.dtype).removeprefix('mlx.core.')} and shape {given.shape}"
    if isinstance(given, bool):
        return f"bool {given}"
    if isinstance(given, int) and given.bit_length() > 2000:  # longer ones Python may refuse to print
        return f"an int of {given.bit_length()} bits"
    if isinstance(given, str) and len(given) > 100:
        return f"a str of {len(given)} characters"
    if given is None or type(given) in (int, float, complex, str):
        return repr(given)
    if type(given) in (list, tuple):
        return f"a {type(given).__name__} of {len(given)}"  # type: ignore[arg-type]  # mypy does not see which
    name = type(given).__qualname__
    if type(given).__module__ != "builtins":
        name = f"{type(given).__module__}.{name}"
    return f"{'an' if name.startswith(('a', 'e', 'i', 'o', 'u', 'mlx')) else 'a'} {name}"


def integer(given: object) -> int | None:
    """The whole number that `given` is, numpy's too; None if it is none."""
    if isinstance(given, bool | mx.array):
        return None
    try:
        return operator.index(given)  # type: ignore[arg-type]  # not an integer: TypeError, see below
    except TypeError:
        return None


def positive(name: str, given: object) -> int:
    """Raises ValueError unless `given` is a whole number above 0 that an int32 holds."""
    number = integer(given)
    if number is None or not 0 < number <= INT32_MAX:
        what = describe(given if number is None else number)
        raise ValueError(f"[flash_attention] {name} is {what}, expected a whole number above 0")
    return number


def finite(name: str, given: Any) -> float:
    """Raises ValueError unless `given` is a number, or an array of one, that float32 holds."""
    if type(given) is float and -_FLOAT32_MAX <= given <= _FLOAT32_MAX:  # as nearly always: the rest takes time
        return given
    try:
        number = math.fsum([given])  # float() also reads text
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not abs(number) <= _FLOAT32_MAX:
        what = describe(given if number is None else number)
        raise ValueError(f"[flash_attention] {name} is {what}, expected a finite number")
    return number


def rounds(precision: object) -> bool:
    """Whether probabilities may be rounded. Raises ValueError for another word than the two that there are."""
    if isinstance(precision, str):  # what is none may not even be comparable
        if precision == "float32":
            return False
        if precision == "input":
            return True
    raise ValueError(f"[flash_attention] precision is {describe(precision)}, expected 'float32' or 'input'")


def array(name: str, given: object) -> mx.array:
    """Raises ValueError unless `given` is an mx.array."""
    if not isinstance(given, mx.array):
        raise ValueError(f"[flash_attention] {name} is {describe(given)}, expected an mx.array")
    return given


def device_of(stream: object) -> mx.Device:
    """Where a stream argument has its op run. Raises ValueError for what is no stream and no device."""
    if stream is None:
        return mx.default_device()
    if isinstance(stream, mx.Stream | mx.ThreadLocalStream):
        return stream.device
    if isinstance(stream, mx.DeviceType):
        return mx.Device(stream)
    if isinstance(stream, mx.Device):
        return stream
    raise ValueError(f"[flash_attention] stream is {describe(stream)}, expected a stream or device of MLX, or None")
