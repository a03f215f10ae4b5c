"""Draws a chart with matplotlib as a picture for the page.

The SVG is drawn in the light colours. Its style sheet replaces them where the background is dark. Programs that ignore
style sheets show the light colours. Only functions that draw import matplotlib, because importing it is slow.
"""

import io
import math
from base64 import b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from flash_evals.pages.chart import Chart
from flash_evals.pages.colors import DARK, LIGHT, WHERE_DARK
from flash_evals.pages.units import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lines differ in marker and in colour. Colour-blind people can tell these colours apart (Okabe and Ito 2008).
LOOKS: dict[str, dict[str, Any]] = {
    "on": {"color": LIGHT["on"], "marker": "o"},
    "off": {"color": LIGHT["off"], "marker": "s"},
    # Dotted, because the lines of naive and mlx nearly coincide where both run the same matrix products.
    "naive": {"color": LIGHT["naive"], "marker": "^", "linestyle": ":"},
    "torch": {"color": LIGHT["torch"], "marker": "D"},
    "other": {"color": LIGHT["soft"], "marker": "v"},
    "bound": {"color": LIGHT["soft"], "marker": ".", "linestyle": "--", "linewidth": 1.25, "markeredgewidth": 0},
}
STYLE: dict[str, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), LIGHT["soft"]),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "lines.markeredgecolor"), LIGHT["card"]),
    **dict.fromkeys((f"axes.spines.{side}" for side in ("left", "right", "top", "bottom")), False),
    **dict.fromkeys(("xtick.bottom", "ytick.left", "legend.frameon", "text.parse_math"), False),
    **dict.fromkeys(
        ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize", "axes.titlesize"), 11
    ),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.grid.axis": "y",
    "grid.color": LIGHT["rule"],
    "lines.linewidth": 2,
    "lines.markersize": 7,
    "svg.fonttype": "none",
    "svg.hashsalt": "flash-evals",  # so that the same chart gives the same bytes
    "figure.dpi": 72,
}
RULES = " ".join(
    f'[style*="{paint}: {light}"] {{ {paint}: {DARK[name]} !important }}'
    for name, light in LIGHT.items()
    for paint in ("fill", "stroke")
)
WIDTH, HEIGHT = 320 / 72, 260 / 72  # of a chart, in inches of 72 CSS pixels
ROOM = 0.22  # least distance of two labelled lengths, as a share of the axis


def picture(chart: Chart) -> str:
    """A data URL of the chart's SVG, for a page that loads no other files."""
    from matplotlib.figure import Figure
    from matplotlib.style import context

    with context(["default", STYLE]):
        drawn = Figure((WIDTH, HEIGHT), layout="constrained")
        ax = drawn.subplots()
        _draw(ax, chart)
        count = len(ax.lines)
        drawn.legend(handles=list(ax.lines), loc="outside lower center", ncols=count if count <= 3 else 2)
        return f"data:image/svg+xml;base64,{b64encode(svg_of(drawn)).decode()}"


def svg_of(drawn: "Figure") -> bytes:
    """The figure as an SVG, with a style sheet for the dark colours. The same figure gives the same bytes."""
    file = io.BytesIO()
    drawn.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    head, start, rest = file.getvalue().partition(b"<svg ")
    style = f"<style>{WHERE_DARK} {{ {RULES} }}</style>"
    tag, end, content = rest.partition(b">")
    return head + start + tag + end + style.encode() + content


def _draw(ax: "Axes", chart: Chart) -> None:
    for series in chart.series:
        look = LOOKS[series.look]
        lengths, values, *band = zip(*map(astuple, series.points), strict=True)
        ax.plot(lengths, values, label=series.name, clip_on=False, **look)
        if any(band[1]):
            ends = np.array(band, dtype=float)  # None becomes NaN, where matplotlib draws no band
            ax.fill_between(lengths, *ends, color=look["color"], alpha=0.18, linewidth=0, clip_on=False)
    low, high = min(chart.values), max(chart.values)
    if chart.axis.logarithmic:
        ticks = _ticks(low, high)
        ax.set_yscale("log")
        ax.set_ylim(ticks[0], ticks[-1])
        ax.set_yticks(ticks)
    else:
        ax.set_ylim(0, 1.1 * high or 1)
    ax.yaxis.set_major_formatter(lambda value, _: chart.axis.tick(value))
    shortest, longest = chart.lengths[0], chart.lengths[-1]
    margin = (longest / shortest) ** 0.06 if shortest < longest else 2
    ax.set_xscale("log", base=2)
    ax.set_xlim(shortest / margin, longest * margin)
    shown = _with_room(chart.lengths)
    ax.set_xticks(shown, [whole(length) for length in shown])
    ax.minorticks_off()
    ax.set_xlabel(chart.against)
    ax.set_title(chart.title, loc="left")


def _ticks(low: float, high: float) -> list[float]:
    """Returns at least two ticks 1, 2, 5, 10 … that enclose the values. If these are more than seven, returns every
    n-th power of ten instead.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [factor * 10.0**power for power in range(first - 1, last + 2) for factor in (1, 2, 5)]
    begin = bisect_right(steps, low * (1 + 1e-9)) - 1
    end = max(bisect_left(steps, high * (1 - 1e-9)), begin + 1)
    if end - begin < 7:
        return steps[begin : end + 1]
    every = math.ceil((last - first) / 6)
    return [10.0**power for power in range(first, last + every, every)]


def _with_room(lengths: Sequence[int]) -> list[int]:
    """Returns the lengths to label, the longest first. Leaves out lengths whose labels would overlap."""
    shown = [lengths[-1]]
    for length in reversed(lengths[:-1]):
        if math.log(shown[-1] / length) >= ROOM * math.log(lengths[-1] / lengths[0]):
            shown.append(length)
    return shown
