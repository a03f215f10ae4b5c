"""Lines of charts of the two arms. It stands by itself: doctor describes what it finds where MLX does not load."""

from collections.abc import Callable, Sequence

from flash_evals.measure import ARMS, Arm
from flash_evals.page.chart import Point, Series


def by_arm(points: Callable[[Arm], Sequence[Point]]) -> list[Series]:
    return [Series(f"patch {name}", name, points(name)) for name in ARMS]
