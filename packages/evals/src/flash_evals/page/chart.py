"""What a chart shows: lines of arms or implementations against a length. drawing.py draws it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flash_evals.measure import ARMS, Arm
from flash_evals.page import units
from flash_evals.page.units import Shown, whole

SMALLEST, LARGEST = 1e-30, 1e30  # beyond these no axis makes sense


@dataclass(frozen=True)
class Point:
    length: int
    value: float
    low: float | None = None  # of a band around the line
    high: float | None = None


@dataclass(frozen=True)
class Axis:
    shown: Shown  # a value in words
    tick: Shown
    logarithmic: bool = True

    def placed(self, point: Point | None) -> Point | None:
        """Of a point what has a place: not 0 on a logarithmic axis, nor a band without one of its ends."""
        if point is None or point.length <= 0 or not self._has_place(point.value):
            return None
        banded = self._has_place(point.low) and self._has_place(point.high)
        return point if banded else Point(point.length, point.value)

    def _has_place(self, value: float | None) -> bool:
        return value is not None and (SMALLEST <= value <= LARGEST or (value == 0 and not self.logarithmic))


TIME = Axis(units.seconds, units.on_axis(units.SECONDS))
SPEED = Axis(units.rate, units.number_tick)
MEMORY = Axis(units.megabytes, units.on_axis(units.MEGABYTES))


@dataclass(frozen=True)
class Series:
    name: str
    look: str  # one of drawing.LOOKS
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    title: str
    axis: Axis
    against: str
    series: Sequence[Series]  # each of at least one point, by growing length

    @property
    def lengths(self) -> list[int]:
        return sorted({point.length for each in self.series for point in each.points})

    @property
    def values(self) -> list[float]:
        """All that the axis has to hold."""
        points = [point for each in self.series for point in each.points]
        return [value for each in points for value in (each.value, each.low, each.high) if value is not None]

    @property
    def in_words(self) -> str:
        """The ends of each line, for those who cannot see it."""

        def end(point: Point) -> str:
            return f"{self.axis.shown(point.value)} at {whole(point.length)}"

        ends = [f"{each.name} from {end(each.points[0])} to {end(each.points[-1])}" for each in self.series]
        return f"{self.title} against {self.against}: {'; '.join(ends)}"


Line = tuple[str, str, Iterable[Point | None]]  # name, look, and points in any order


def chart(title: str, axis: Axis, against: str, lines: Iterable[Line]) -> Chart:
    """Of these lines what has a place."""
    series = []
    for name, look, points_ in lines:
        if points := sorted(filter(None, map(axis.placed, points_)), key=lambda point: point.length):
            series.append(Series(name, look, points))
    return Chart(title, axis, against, series)


def point(length: int, value: float | None, low: float | None = None, high: float | None = None) -> Point | None:
    """None of a value that is not known."""
    return None if value is None else Point(length, value, low, high)


def arms(points: Callable[[Arm], Iterable[Point | None]]) -> list[Line]:
    """A line for each arm."""
    return [(f"patch {name}", name, points(name)) for name in ARMS]
