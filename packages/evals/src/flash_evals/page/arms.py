"""What the descriptions of perplexity, speed and finetune share: two arms of a model."""

from collections.abc import Callable, Sequence

from flash_evals.measure import ARMS, Arm
from flash_evals.page.chart import Point, Series
from flash_evals.page.description import NEVER_RAN, interrupted
from flash_evals.result import ModelResult


def by_arm(points: Callable[[Arm], Sequence[Point]]) -> list[Series]:
    """A line for each arm."""
    return [Series(f"patch {name}", name, points(name)) for name in ARMS]


def warnings(result: ModelResult, finished: str, patched: bool = True) -> list[str]:
    """`patched`: whether an arm had the patch on."""
    ran = result.flash.calls or not patched
    return [*([] if ran else [NEVER_RAN]), *([interrupted(finished)] if result.interrupted else [])]
