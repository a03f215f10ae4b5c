"""Figures as pages show them, of the units that result files have: a text, and the exact number behind it."""

import math
from collections.abc import Callable, Sequence

from flash_evals.claims import MARK, Ratio, times

Cell = str | Sequence[str]  # of a table, or a sentence: a text, or what makes one
Shown = Callable[[float], str]
Units = Sequence[tuple[float, str]]  # size and name, the largest first

DASH = "–"  # for a figure that is not finite or not known
NOT_FINITE = "not finite"
SECONDS: Units = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
MEGABYTES: Units = ((1e3, "GB"), (1, "MB"), (1e-3, "kB"))

whole: Shown = "{:,.0f}".format
scientific: Shown = "{:.1e}".format
signed: Shown = "{:+.1e}".format
megabytes: Shown = "{:,.1f} MB".format
number_tick: Shown = "{:,.6g}".format


class Figure(str):
    """A number as a person reads it, and as it is."""

    __slots__ = ("value",)
    value: float

    def __new__(cls, text: str, value: float) -> "Figure":
        made = super().__new__(cls, text)
        made.value = value
        return made


def figure(value: float | None, shown: Shown, otherwise: str = DASH) -> str:
    """`otherwise` stands for what is not known or not finite."""
    return otherwise if value is None or not math.isfinite(value) else Figure(shown(value), value)


def ratio(of: Ratio) -> Cell:
    """`0.62x`, `1.02x ~`; empty if it is not known."""
    return [figure(of.value, times, ""), f" {MARK}" if of.sign == 0 else ""]


def decimal(digits: int) -> Shown:
    """So many decimals while that is readable and leaves two digits, else two or three digits."""

    def shown(x: float) -> str:
        if x and abs(x) < 10.0 ** (1 - digits):
            return f"{x:.2g}"
        return f"{x:,.{digits}f}" if abs(x) < 1e7 else f"{x:.2e}"

    return shown


def rate(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"


def percent(x: float) -> str:
    """Rounded down: 100 % only if it is all."""
    return f"{math.floor(x * 1e5) / 1e3:.3f} %"


def share(x: float) -> str:
    return f"{x:,.0%}" if x >= 0.1 else f"{100 * x:.2g}%"


def seconds(x: float) -> str:
    """Three digits in the unit that suits: `4.21 ms`, `132 s`."""
    return _three_digits(SECONDS, x)[0]


def memory(x: float) -> str:
    """Of MB, likewise: `7.17 kB`, for what is too little to be told in MB."""
    return _three_digits(MEGABYTES, x)[0]


def duration(middle: float, low: float, high: float) -> Cell:
    """With the range around it, in the same unit: `4.21 ms (4.20–4.25)`."""
    text, *ends = _three_digits(SECONDS, middle, low, high)
    return [Figure(text, middle), f" ({'–'.join(ends)})"]


def _three_digits(units: Units, x: float, *others: float) -> list[str]:
    """Of the first, with its unit; the others have the same unit and as many digits."""
    size, unit = _unit(x, units)
    digits = 2 if x < 10 * size else 1 if x < 100 * size else 0
    text, *ends = (f"{each / size:,.{digits}f}" for each in (x, *others))
    return [f"{text} {unit}", *ends]


def on_axis(units: Units) -> Shown:
    """`500 ms`, `2 GB`."""

    def shown(x: float) -> str:
        size, unit = _unit(x, units)
        return f"{x / size:,.6g} {unit}"

    return shown


def _unit(x: float, units: Units) -> tuple[float, str]:
    """The largest that x reaches, or the smallest there is."""
    return next((unit for unit in units if x >= unit[0] * (1 - 1e-9)), units[-1])


def percent_tick(x: float) -> str:
    return f"{100 * x:,.6g} %"
