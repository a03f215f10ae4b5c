"""The data of a chart, which drawing.py draws. Each arm or implementation has a line. The x axis is a length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flash_evals.pages import units
from flash_evals.pages.units import Shown, whole
from flash_evals.results.arms import ARMS, Arm

SMALLEST, LARGEST = 1e-30, 1e30  # values outside this range are not drawn


@dataclass(frozen=True)
class Axis:
    tick: Shown  # formats a value
    logarithmic: bool = True

    def has_place(self, value: float | None) -> bool:
        """Whether the axis can show the value: it must be known and, on a logarithmic axis, not 0."""
        return value is not None and (SMALLEST <= value <= LARGEST or (value == 0 and not self.logarithmic))


TIME = Axis(units.on_axis(units.SECONDS))
SPEED = Axis(units.number_tick)
MEMORY = Axis(units.on_axis(units.MEGABYTES))


@dataclass(frozen=True)
class Point:
    length: int
    value: float  # NaN: unknown
    low: float | None = None  # lower end of a band around the line
    high: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    look: str  # one of drawing.LOOKS
    points: Sequence[Point]


def by_arm(points: Callable[[Arm], Sequence[Point]]) -> list[Series]:
    return [Series(f"patch {name}", name, points(name)) for name in ARMS]


@dataclass
class Chart:
    """A chart with the points that its axis can show, sorted by length. A band needs both `low` and `high`."""

    title: str
    axis: Axis
    against: str
    series: Sequence[Series]

    def __post_init__(self) -> None:
        has_place = self.axis.has_place
        kept = []
        for each in self.series:
            points = [
                point if has_place(point.low) and has_place(point.high) else Point(point.length, point.value)
                for point in sorted(each.points, key=lambda point: point.length)
                if point.length > 0 and has_place(point.value)
            ]
            kept += [replace(each, points=points)] if points else []
        self.series = kept

    @property
    def lengths(self) -> list[int]:
        return sorted({point.length for each in self.series for point in each.points})

    @property
    def values(self) -> list[float]:
        points = [point for each in self.series for point in each.points]
        return [value for each in points for value in (each.value, each.low, each.high) if value is not None]

    @property
    def in_words(self) -> str:
        """Text for readers who cannot see the chart: the first and the last value of each line."""
        lines = []
        for each in self.series:
            ends = (f"{self.axis.tick(at.value)} at {whole(at.length)}" for at in (each.points[0], each.points[-1]))
            lines.append(f"{each.name} from {' to '.join(ends)}")
        return f"{self.title} against {self.against}: {'; '.join(lines)}"
