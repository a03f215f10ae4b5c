"""Formats numbers for the pages. The numbers are in the units of result files."""

import math
from collections.abc import Callable, Sequence

from flash_evals.results.claims import MARK, Ratio, times

Shown = Callable[[float], str]
Units = Sequence[tuple[float, str]]  # (size, name), the largest first

DASH = "–"  # for a figure that is not finite or unknown
NOT_FINITE = "not finite"
SECONDS: Units = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
MEGABYTES: Units = ((1e3, "GB"), (1, "MB"), (1e-3, "kB"))

whole: Shown = "{:,.0f}".format
scientific: Shown = "{:.1e}".format
signed: Shown = "{:+.1e}".format
megabytes: Shown = "{:,.1f} MB".format
number_tick: Shown = "{:,.6g}".format


def figure(value: float | None, shown: Shown, otherwise: str = DASH) -> str:
    """Formats `value`; returns `otherwise` if it is unknown or not finite."""
    return otherwise if value is None or not math.isfinite(value) else shown(value)


def ratio(of: Ratio) -> str:
    """Formats a ratio: `0.62x`, or `1.02x ~` for no clear difference. Returns "" for an unknown ratio."""
    return figure(of.value, times, "") + (f" {MARK}" if of.sign == 0 else "")


def decimal(digits: int) -> Shown:
    """Formats with `digits` decimals. Small numbers get two significant digits, numbers from 1e7 on get three."""

    def shown(x: float) -> str:
        if x and abs(x) < 10.0 ** (1 - digits):
            return f"{x:.2g}"
        return f"{x:,.{digits}f}" if abs(x) < 1e7 else f"{x:.2e}"

    return shown


def rate(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"


def percent(x: float) -> str:
    """Formats a share. Rounds down, so that only 1 shows as 100 %."""
    return f"{math.floor(x * 1e5) / 1e3:.3f} %"


def share(x: float) -> str:
    return f"{x:,.0%}" if x >= 0.1 else f"{100 * x:.2g}%"


def duration(middle: float, low: float, high: float) -> str:
    """Three digits in a suitable unit, and the range in the same format: `4.21 ms (4.20–4.25)`."""
    size, unit = _unit(middle, SECONDS)
    digits = 2 if middle < 10 * size else 1 if middle < 100 * size else 0
    text, low_text, high_text = (f"{each / size:,.{digits}f}" for each in (middle, low, high))
    return f"{text} {unit} ({low_text}–{high_text})"


def on_axis(units: Units) -> Shown:
    """A formatter of tick labels: `500 ms`, `2 GB`."""

    def shown(x: float) -> str:
        size, unit = _unit(x, units)
        return f"{x / size:,.6g} {unit}"

    return shown


def _unit(x: float, units: Units) -> tuple[float, str]:
    """Returns the largest unit that x reaches, or the smallest unit if x reaches none."""
    return next((unit for unit in units if x >= unit[0] * (1 - 1e-9)), units[-1])
