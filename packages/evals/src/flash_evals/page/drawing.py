"""Draws charts with matplotlib, in the light colours of colors.css; in an SVG a style sheet has the dark ones.

matplotlib is imported where something is drawn, since it takes its time.
"""

import io
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, astuple
from importlib.resources import files
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np

from flash_evals.errors import EvalError
from flash_evals.page.chart import Chart, Series
from flash_evals.page.html import Html, join, tag
from flash_evals.page.units import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = files("flash_evals.page").joinpath("colors.css").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", COLORS.partition("@media")[0]))
PAINTS = [(paint, name, color) for paint in ("fill", "stroke") for name, color in LIGHT.items()]
RULES = " ".join(f'[{paint}="{color}"] {{ {paint}: var(--{name}) }}' for paint, name, color in PAINTS)
# What does not know variables shows an SVG in the colours that it is drawn in, and passes over this.
STYLESHEET = f"{COLORS}@media (prefers-color-scheme: dark), print {{ {RULES} }}\n"

# A colour and a marker each: lines can be told apart by colour-blind people (Okabe and Ito 2008) and without colour.
LOOKS: dict[str, dict[str, Any]] = {
    "on": {"color": LIGHT["on"], "marker": "o"},
    "off": {"color": LIGHT["off"], "marker": "s"},
    # Near mlx where both run on the same products: dotted, it hides nothing.
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
    "figure.dpi": 72,
    "savefig.dpi": 144,
}
WIDTH, HEIGHT = 320 / 72, 220 / 72  # inches: on the page one unit is a CSS pixel
AREA = (56 / 320, 38 / 220, 252 / 320, 174 / 220)  # left, bottom, width and height of what is plotted
LETTERS = 48  # of a title above a chart's width
ROOM = 0.22  # of the width, for a label of a length


def row(title: str, charts: Sequence[Chart]) -> Html:
    """On the page beside each other, as many as there is room for; none of a single length, which is no line."""
    drawn = [_figure(chart) for chart in charts if len(chart.lengths) > 1]
    head = tag("h4", title) if title else Html()
    return join([head, tag("div", drawn, class_="charts")]) if drawn else Html()


def _figure(chart: Chart) -> Html:
    """Its title and its legend are HTML, which breaks lines."""
    from matplotlib.figure import Figure
    from matplotlib.style import context

    with context(["default", STYLE]):
        drawn = Figure((WIDTH, HEIGHT))
        _draw(drawn.add_axes(AREA), chart, 0)
        picture = _svg(drawn, [chart])
    picture.attrib |= {"role": "img", "aria-label": chart.in_words}
    keys = [tag("li", _key(lines), lines.attrib["data-series"]) for lines in picture.iterfind(".//g[@data-series]")]
    return tag("figure", tag("figcaption", chart.title, tag("ul", keys, class_="legend")), _html(picture))


def _key(series: Element) -> Html:
    """For a legend: the line, and its first marker in the middle."""
    line, marker, *_ = series.iter("path")
    key = Element("svg", {"viewBox": "0 0 28 14", "aria-hidden": "true"})
    key.append(Element("path", line.attrib | {"d": "M1 7H27"}))
    looks = {name: value for name, value in marker.attrib.items() if not name.startswith("data-")}
    key.append(Element("path", looks | {"transform": "translate(14 7)"}))
    return _html(key)


def _html(element: Element) -> Html:
    return Html(ElementTree.tostring(element, "unicode"))


def save(path: Path, title: str, rows: Sequence[tuple[str, Sequence[Chart]]]) -> None:
    """Writes a .png or .svg file of rows of charts, each with its title. Raises EvalError if the disk takes none."""
    from matplotlib.figure import Figure
    from matplotlib.style import context

    rows = [(name, [chart for chart in row if chart.series]) for name, row in rows]
    charts = [chart for _, row in rows for chart in row]
    with context(["default", STYLE]):
        columns = max(len(row) for _, row in rows)
        drawn = Figure((1.15 * WIDTH * columns, 0.9 + 1.2 * HEIGHT * len(rows)), layout="constrained")
        drawn.suptitle(fill(title, LETTERS * columns), color=LIGHT["ink"])
        parts = drawn.subfigures(len(rows), squeeze=False)[:, 0]
        axes = []
        for part, (name, row) in zip(parts, rows, strict=True):
            part.suptitle(fill(name, LETTERS * columns), color=LIGHT["ink"], weight="bold")
            axes += list(part.subplots(1, columns, squeeze=False)[0, : len(row)])
        for number, (ax, chart) in enumerate(zip(axes, charts, strict=True)):
            ax.set_title(chart.title, loc="left")
            _draw(ax, chart, number)
        lines = {line.get_label(): line for ax in axes for line in ax.lines}
        drawn.legend(handles=list(lines.values()), loc="outside lower center", ncols=len(lines))
        try:
            if path.suffix == ".png":
                drawn.savefig(path)
            else:
                picture = _svg(drawn, charts)
                picture.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": title}
                style = Element("style")
                style.text = STYLESHEET + "text { font-family: system-ui, sans-serif; }\n"
                picture.insert(0, style)
                path.write_text(_html(picture), encoding="utf-8")
        except OSError as error:
            raise EvalError(f"cannot write {path}: {error.strerror}") from error


def _draw(ax: "Axes", chart: Chart, number: int) -> None:
    """`number` of the chart among those of the figure."""
    for index, series in enumerate(chart.series):
        look = LOOKS[series.look]
        lengths, values, *band = zip(*map(astuple, series.points), strict=True)
        ax.plot(lengths, values, label=series.name, gid=f"{number}.{index}", clip_on=False, **look)
        if any(band[1]):
            ends = np.array(band, dtype=float)  # None is NaN, and has no band
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


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 around the values, at least two; where these are more than seven, powers of ten, or of so many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [factor * 10.0**power for power in range(first - 1, last + 2) for factor in (1, 2, 5)]
    begin = bisect_right(steps, low * (1 + 1e-9)) - 1
    end = max(bisect_left(steps, high * (1 - 1e-9)), begin + 1)
    if end - begin < 7:
        return steps[begin : end + 1]
    every = math.ceil((last - first) / 6)
    return [10.0**power for power in range(first, last + every, every)]


def _with_room(lengths: Sequence[int]) -> list[int]:
    """Those whose labels do not meet, from the longest down."""
    shown = [lengths[-1]]
    for length in reversed(lengths[:-1]):
        if math.log(shown[-1] / length) >= ROOM * math.log(lengths[-1] / lengths[0]):
            shown.append(length)
    return shown


def _svg(drawn: "Figure", charts: Sequence[Chart]) -> Element:
    """An SVG that can stand on a page with others: it has no ids, and each look is an attribute of its own."""
    text = io.StringIO()
    drawn.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(text.getvalue())
    named = {element.get("id", ""): element for element in root.iter()}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # HTML has no namespaces
        if element.tag == "use":
            element.tag = "path"
            element.attrib["d"] = named[element.attrib.pop("{http://www.w3.org/1999/xlink}href")[1:]].attrib["d"]
            element.attrib["transform"] = f"translate({element.attrib.pop('x')} {element.attrib.pop('y')})"
        looks = dict(re.findall("([a-z-]+): ([^;]+)", element.attrib.pop("style", "")))
        element.attrib |= {name: look for name, look in looks.items() if name != "font-family"}
    for element in list(root.iter()):
        for unused in ("id", "clip-path"):
            element.attrib.pop(unused, None)
        for definitions in element.findall("defs"):
            element.remove(definitions)
    for number, chart in enumerate(charts):
        for index, series in enumerate(chart.series):
            _annotate(named[f"{number}.{index}"], chart, series)
    return root


def _annotate(lines: Element, chart: Chart, series: Series) -> None:
    """With the numbers as they are, and in words for a pointer above them."""
    lines.attrib["data-series"] = series.name
    line, *marks = lines.iter("path")
    line.attrib["class"] = "line"
    for mark, point in zip(marks, series.points, strict=True):
        mark.attrib |= {f"data-{name}": repr(value) for name, value in asdict(point).items() if value is not None}
        words = f"{series.name}, {whole(point.length)}: {chart.axis.shown(point.value)}"
        ElementTree.SubElement(mark, "title").text = words
