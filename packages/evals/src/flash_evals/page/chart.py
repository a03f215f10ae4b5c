"""A chart as inline SVG: lines against the length. Its text is text, and its colours are those of the style sheet."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flash_evals.page import units
from flash_evals.page.html import Html, tag
from flash_evals.page.units import Shown, whole

WIDTH, HEIGHT = 320, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 312, 12, 180  # of the plotted area
ROOM = 46  # for a label of the x axis
HALF = 4  # of a marker
SMALLEST, LARGEST = 1e-30, 1e30  # beyond these no axis makes sense


@dataclass(frozen=True)
class Point:
    length: int
    value: float
    low: float | None = None  # of a band around the line
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    look: str  # a class of the style sheet, and a marker
    points: Sequence[Point]


@dataclass(frozen=True)
class Axis:
    shown: Shown  # a value in a title
    tick: Shown
    logarithmic: bool = True


TIME = Axis(units.seconds, units.on_axis(units.SECONDS))
SPEED = Axis(units.rate, units.number_tick)
MEMORY = Axis(units.megabytes, units.on_axis(units.MEGABYTES))


def row(charts: Sequence[Html | None]) -> Html:
    """Beside each other, as many as there is room for."""
    drawn = [each for each in charts if each is not None]
    return tag("div", drawn, class_="charts") if drawn else Html()


def lines(title: str, axis: Axis, against: str, series: Sequence[Series]) -> Html | None:
    """None if there are not two lengths to draw a line between. On a logarithmic axis 0 has no place."""
    drawn = [Series(each.name, each.look, _placeable(each.points, axis)) for each in series]
    drawn = [each for each in drawn if each.points]
    lengths = sorted({point.length for each in drawn for point in each.points})
    if len(lengths) < 2:
        return None
    values = [value for each in drawn for point in each.points for value in _extent(point, axis)]
    ticks = _ticks_log(min(values), max(values)) if axis.logarithmic else _ticks(max(values))
    x = _scale(math.log2(lengths[0]), math.log2(lengths[-1]), LEFT + 14, RIGHT - 14)
    low, high = (math.log10(ticks[0]), math.log10(ticks[-1])) if axis.logarithmic else (ticks[0], ticks[-1])
    level = _scale(low, high, BOTTOM, TOP)

    def place(length: float, value: float) -> tuple[float, float]:
        return x(math.log2(length)), level(math.log10(value) if axis.logarithmic else value)

    picture = tag(
        "svg",
        _grid(ticks, axis.tick, lambda value: place(lengths[0], value)[1]),
        _lengths(lengths, lambda length: place(length, ticks[-1])[0]),
        tag("text", against, x=(LEFT + RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle"),
        [_line(each, axis, place) for each in drawn],
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=_in_words(title, against, axis, drawn),
    )
    return tag("figure", tag("figcaption", title, _legend(drawn)), picture)


def _placeable(points: Sequence[Point], axis: Axis) -> list[Point]:
    return sorted((p for p in points if p.length > 0 and _has_place(p.value, axis)), key=lambda point: point.length)


def _extent(point: Point, axis: Axis) -> list[float]:
    values = (point.value, point.low, point.high)
    return [value for value in values if value is not None and _has_place(value, axis)]


def _has_place(value: float, axis: Axis) -> bool:
    return SMALLEST <= value <= LARGEST or (value == 0 and not axis.logarithmic)


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    return lambda value: round(first + (value - low) / (high - low) * (last - first), 1)


def _ticks_log(low: float, high: float) -> list[float]:
    """1, 2, 5, 10 around the values; over more decades fewer, so that six or less remain."""
    for step in ((1, 2, 5), (1,)):
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1
        steps = [factor * 10.0**power for power in range(first, last + 1) for factor in step]
        below = max(index for index, value in enumerate(steps) if value <= low * (1 + 1e-9))
        above = min(index for index, value in enumerate(steps) if value >= high * (1 - 1e-9) and index > below)
        ticks = steps[below : above + 1]
        if len(ticks) <= 7:
            return ticks
    every = math.ceil((len(ticks) - 1) / 6)
    power = math.log10(ticks[0])
    return [10.0 ** (power + every * index) for index in range(math.ceil((len(ticks) - 1) / every) + 1)]


def _ticks(high: float) -> list[float]:
    """From 0 in even steps of 1, 2 or 5 to the value or above it."""
    rough = (high or 1) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [step * index for index in range(max(1, math.ceil(high / step - 1e-9)) + 1)]


def _grid(ticks: Sequence[float], shown: Shown, level: Callable[[float], float]) -> list[Html]:
    return [
        tag(
            "g",
            tag("path", d=f"M{LEFT} {level(tick)}H{RIGHT}", class_="grid"),
            tag("text", shown(tick), x=LEFT - 6, y=level(tick) + 4, text_anchor="end"),
        )
        for tick in ticks
    ]


def _lengths(lengths: Sequence[int], place: Callable[[float], float]) -> list[Html]:
    """The lengths that were measured; those that there is room for, from the longest down."""
    shown: list[int] = []
    for length in reversed(lengths):
        if not shown or place(shown[-1]) - place(length) >= ROOM:
            shown.append(length)
    return [tag("text", whole(n), x=place(n), y=BOTTOM + 17, text_anchor="middle") for n in reversed(shown)]


def _line(series: Series, axis: Axis, place: Callable[[float, float], tuple[float, float]]) -> Html:
    at = [place(point.length, point.value) for point in series.points]
    marks = [
        tag(
            "g",
            tag("title", f"{series.name}, {whole(point.length)}: {axis.shown(point.value)}"),
            marker(series.look, *where),
            class_="point",
            data_length=point.length,
            data_value=repr(point.value),
        )
        for point, where in zip(series.points, at, strict=True)
    ]
    band = [
        (place(point.length, point.low), place(point.length, point.high))
        for point in series.points
        if point.low is not None and point.high is not None and len(_extent(point, axis)) == 3
    ]
    outline = [low for low, _ in band] + [high for _, high in reversed(band)]
    return tag(
        "g",
        tag("path", d=_path(outline) + "Z", class_="band") if outline else "",
        tag("path", d=_path(at), class_="line"),
        marks,
        class_=f"series {series.look}",
        data_series=series.name,
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def marker(look: str, x: float, y: float) -> Html:
    """A shape for each look: lines can be told apart without colour."""
    match look:
        case "on":
            return tag("circle", cx=x, cy=y, r=HALF, class_="mark")
        case "off":
            return tag(
                "rect", x=x - HALF + 0.5, y=y - HALF + 0.5, width=2 * HALF - 1, height=2 * HALF - 1, class_="mark"
            )
        case "naive":
            shape = f"M{x} {y - HALF}L{x + HALF} {y + HALF}H{x - HALF}Z"
        case "torch":
            shape = f"M{x} {y - HALF - 1}L{x + HALF + 1} {y}L{x} {y + HALF + 1}L{x - HALF - 1} {y}Z"
        case _:
            shape = f"M{x - HALF} {y}H{x + HALF}"
    return tag("path", d=shape, class_="mark")


def _legend(series: Sequence[Series]) -> Html:
    keys = [
        tag(
            "li",
            tag(
                "svg",
                tag("g", tag("path", d="M1 7H27", class_="line"), marker(each.look, 14, 7), class_=each.look),
                viewBox="0 0 28 14",
                aria_hidden="true",
            ),
            each.name,
        )
        for each in series
    ]
    return tag("ul", keys, class_="legend")


def _in_words(title: str, against: str, axis: Axis, series: Sequence[Series]) -> str:
    """The ends of each line, for those who cannot see it."""
    ends = [
        f"{each.name} from {axis.shown(first.value)} at {whole(first.length)} "
        f"to {axis.shown(last.value)} at {whole(last.length)}"
        for each in series
        for first, last in [(each.points[0], each.points[-1])]
    ]
    return f"{title} against {against}: {'; '.join(ends)}"
