"""Checks the types of Python arguments, and describes wrong ones for messages. C++ checks shapes and dtypes."""

import contextlib
import math
import operator
from typing import Any

import mlx.core as mx

from . import _ext

INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38


def describe(given: object) -> str:
    """Describes `given` in a few words. Calls repr() only for simple types, as repr() may fail or evaluate an array."""
    if isinstance(given, mx.array):
        return f"an array of {str(given.dtype).removeprefix('mlx.core.')} and shape {given.shape}"
    if isinstance(given, bool):
        return f"bool {given}"
    if isinstance(given, int) and given.bit_length() > 2000:  # Python may refuse to print it
        return f"an int of {given.bit_length()} bits"
    if isinstance(given, str) and len(given) > 100:
        return f"a str of {len(given)} characters"
    if given is None or type(given) in (int, float, complex, str):
        return repr(given)
    if type(given) in (list, tuple):
        return f"a {type(given).__name__} of {len(given)}"  # type: ignore[arg-type]  # mypy does not narrow the type
    name = type(given).__qualname__
    if type(given).__module__ != "builtins":
        name = f"{type(given).__module__}.{name}"
    return f"{'an' if name.startswith(('a', 'e', 'i', 'o', 'u', 'mlx')) else 'a'} {name}"


def integer(given: object) -> int | None:
    """`given` as an int if it is a whole number of Python or numpy; else None."""
    if isinstance(given, bool | mx.array):
        return None
    try:
        return operator.index(given)  # type: ignore[arg-type]  # raises TypeError if it is no integer
    except TypeError:
        return None


def whole(name: str, given: object, least: int, most: float, expected: str) -> int:
    """`given` as an int. Raises ValueError unless it is a whole number from `least` to `most`."""
    number = integer(given)
    if number is None or not least <= number <= most:
        raise ValueError(f"{name} is {describe(given if number is None else number)}, expected {expected}")
    return number


def finite(name: str, given: Any, cure: str) -> float:
    """`given` as a float. Raises ValueError unless it is a finite number in float32's range, or an array that holds one
    such number.

    Raises ValueError for an array that MLX traces, because its gradient would silently be 0. The text ends with `cure`.
    """
    if type(given) is float and -_FLOAT32_MAX <= given <= _FLOAT32_MAX:  # the usual case, which must be fast
        return given
    # While MLX recomputes a function of mx.checkpoint, it calls every array traced. Then the forward pass has checked.
    if isinstance(given, mx.array) and _ext.is_tracing(given) and not _ext.is_tracing(mx.array(0)):
        expected = "a number that mx.grad, mx.jvp, mx.vmap or mx.compile does not trace"
        raise ValueError(f"[flash_attention] {name} is {describe(given)}, expected {expected}: {cure}")
    number = None
    if getattr(getattr(given, "dtype", None), "kind", "") != "c":  # fsum() would drop the imaginary part of numpy's
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = math.fsum([given])  # not float(), which also parses text
    if number is None or not abs(number) <= _FLOAT32_MAX:
        what = describe(given if number is None else number)
        raise ValueError(f"[flash_attention] {name} is {what}, expected a finite number")
    return number


def rounds(precision: object) -> bool:
    """Whether probabilities may be rounded. Raises ValueError unless `precision` is "float32" or "input"."""
    if not isinstance(precision, str) or precision not in ("float32", "input"):  # comparing another type may fail
        raise ValueError(f"[flash_attention] precision is {describe(precision)}, expected 'float32' or 'input'")
    return precision == "input"


def boolean(name: str, given: object) -> bool:
    """Returns `given`. Raises ValueError unless it is True or False."""
    if not isinstance(given, bool):
        raise ValueError(f"[flash_attention] {name} is {describe(given)}, expected True or False")
    return given


def array(name: str, given: object) -> mx.array:
    """Returns `given`. Raises ValueError unless it is an mx.array."""
    if not isinstance(given, mx.array):
        raise ValueError(f"[flash_attention] {name} is {describe(given)}, expected an mx.array")
    return given


def backend_of(stream: Any) -> str:
    """The backend that an op with this `stream` argument runs on. Raises ValueError for anything but a stream, a device
    and None."""
    if not isinstance(stream, mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None):
        raise ValueError(f"[flash_attention] stream is {describe(stream)}, expected a stream or device of MLX, or None")
    device: Any = mx.default_device() if stream is None else getattr(stream, "device", stream)
    return _ext.backend_of(device)
