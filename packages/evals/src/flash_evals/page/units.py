"""Figures as the page shows them, of the units that result files have."""

import math
from collections.abc import Callable, Sequence

Shown = Callable[[float], str]
Units = Sequence[tuple[float, str]]  # size and name, the largest first

SECONDS: Units = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
MEGABYTES: Units = ((1e3, "GB"), (1, "MB"), (1e-3, "kB"))


def whole(x: float) -> str:
    return f"{x:,.0f}"


def decimal(digits: int) -> Shown:
    """So many decimals while that is readable and leaves two digits, else two or three digits."""

    def shown(x: float) -> str:
        if x and abs(x) < 10.0 ** (1 - digits):
            return f"{x:.2g}"
        return f"{x:,.{digits}f}" if abs(x) < 1e7 else f"{x:.2e}"

    return shown


def scientific(x: float) -> str:
    return f"{x:.1e}"


def signed(x: float) -> str:
    return f"{x:+.1e}"


def rate(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"


def percent(x: float) -> str:
    """Rounded down: 100 % only if it is all."""
    return f"{math.floor(x * 1e5) / 1e3:.3f} %"


def share(x: float) -> str:
    return f"{x:,.0%}" if x >= 0.1 else f"{100 * x:.2g}%"


def seconds(x: float) -> str:
    """Three digits in the unit that suits: `4.21 ms`, `132 s`."""
    return _three_digits(x, SECONDS)


def memory(x: float) -> str:
    """Of MB, likewise: `7.17 kB`, for what is too little to be told in MB."""
    return _three_digits(x, MEGABYTES)


def _three_digits(x: float, units: Units) -> str:
    size, unit = _unit(x, units)
    x /= size
    return f"{x:,.{2 if x < 10 else 1 if x < 100 else 0}f} {unit}"


def megabytes(x: float) -> str:
    return f"{x:,.1f} MB"


def on_axis(units: Units) -> Shown:
    """`500 ms`, `2 GB`."""

    def shown(x: float) -> str:
        size, unit = _unit(x, units)
        return f"{x / size:,.6g} {unit}"

    return shown


def _unit(x: float, units: Units) -> tuple[float, str]:
    """The largest that x reaches, or the smallest there is."""
    return next((unit for unit in units if x >= unit[0] * (1 - 1e-9)), units[-1])


def number_tick(x: float) -> str:
    return f"{x:,.6g}"


def percent_tick(x: float) -> str:
    return f"{100 * x:,.6g} %"
