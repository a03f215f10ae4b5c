"""Decides whether a page may claim that one of two sides is faster or needs less memory. Nothing else decides that.

A page claims a difference if the trials of the two sides are apart and their ratio is not shown as 1.00x. Trials are
apart if their ranges from the 20th to the 80th percentile do not overlap. If a side has fewer than three trials, the
trials are apart only if every trial of one side is at least twice every trial of the other side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_evals.results.arms import ByArm

ENOUGH = 3  # with fewer trials of a side, percentiles say little
NOTHING = "no clear difference"
MARK = "~"  # follows a ratio that is no clear difference
LEGEND = (  # shown with tables that have the mark
    f"{MARK} marks {NOTHING}: the trials of both sides overlap (20th to 80th percentile), "
    f"or are fewer than {ENOUGH} and less than twofold apart."
)


@dataclass(frozen=True)
class Ratio:
    """One side's figure divided by the other side's. `value` is None if the ratio is unknown."""

    value: float | None
    apart: bool  # the result of apart() for the two sides' trials

    @classmethod
    def of(cls, value: float | None, one: Sequence[float], other: Sequence[float]) -> "Ratio":
        return cls(value, apart(one, other))

    @classmethod
    def of_arms(cls, value: float | None, trials: "Sequence[ByArm[Any]]", figure: str) -> "Ratio":
        """Makes a Ratio. value: patch on / patch off. figure: the attribute of each arm's trial, such as "seconds"."""
        return cls.of(value, *([getattr(getattr(trial, arm), figure) for trial in trials] for arm in ("off", "on")))

    @property
    def sign(self) -> int | None:
        """1 if the ratio is clearly above 1, -1 if clearly below 1, 0 if neither, None if the ratio is unknown."""
        if self.value is None:
            return None
        return 0 if not self.apart or times(self.value) == times(1) else 1 if self.value > 1 else -1


def apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the two sides' trials are apart, as defined at the top of this file.

    True if a side has no trials, because then only the two figures can be compared.
    """
    if not one or not other:
        return True
    if min(len(one), len(other)) < ENOUGH:
        return 2 * max(one) <= min(other) or 2 * max(other) <= min(one)
    (low, high), (other_low, other_high) = ([percentile(x, share) for share in (0.2, 0.8)] for x in (one, other))
    return high < other_low or other_high < low


def percentile(values: Sequence[float], share: float) -> float:
    """The value at `share` (0 to 1) of the sorted values, interpolated linearly as numpy does it."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def sentence(ratios: dict[str, Ratio]) -> str:
    """The known ratios in words: `0.62x the memory, no clear difference in speed`."""
    said = [
        f"{times(ratio.value)} the {what}" for what, ratio in ratios.items() if ratio.value is not None and ratio.sign
    ]
    unclear = [what for what, ratio in ratios.items() if ratio.sign == 0]
    return ", ".join([*said, *([f"{NOTHING} in {' and '.join(unclear)}"] if unclear else [])])


def quotient(one: float | None, other: float | None) -> float | None:
    """Returns one / other, or None if either is unknown or `other` is 0."""
    return one / other if one is not None and other else None


def times(x: float) -> str:
    return f"{x:,.2f}x"
