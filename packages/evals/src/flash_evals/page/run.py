"""What the page knows of one measurement, whichever command made it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flash_evals import output
from flash_evals.measure import ARMS, Arm
from flash_evals.page import units
from flash_evals.page.html import DASH, Content, Html, facts, tag
from flash_evals.page.result_file import Node

MLX = ("off", "mlx")  # what is MLX's own attention


@dataclass(frozen=True)
class Comparison:
    """Flash and another on the same work."""

    work: str
    against: str  # "off", or an implementation
    speed: "Ratio"  # so many times as fast is flash
    memory: "Ratio"  # flash's part of the other's


@dataclass(frozen=True)
class Ratio:
    value: float | None
    apart: bool  # whether the trials of the two lie apart, or overlap

    @property
    def sign(self) -> int | None:
        """1 above 1, -1 below. 0 if the trials overlap, and if it is 1.00 as it is shown; None if it is not known."""
        if self.value is None:
            return None
        level = not self.apart or units.times(self.value) == units.times(1)
        return 0 if level else 1 if self.value > 1 else -1


@dataclass(frozen=True)
class Run:
    file: str
    command: str
    title: str
    facts: Sequence[str]  # model, machine, settings that matter
    body: Sequence[Html]  # tables and charts
    about: Html  # all settings, and the machine
    ran: bool  # flash did at all
    interrupted: bool
    comparisons: Sequence[Comparison] = ()
    predictions: "Predictions | None" = None
    training: "Training | None" = None
    reading: "Reading | None" = None


@dataclass(frozen=True)
class Predictions:
    same: bool | None  # None: not known
    says: Content


@dataclass(frozen=True)
class Training:
    longest: int  # tokens
    skipped: Sequence[str]  # lengths that had no memory, and why, in words
    says: Content


@dataclass(frozen=True)
class Reading:
    """Of a text in windows: what runs of several contexts have in common, and what becomes of it with the length."""

    shared: str
    context: int
    speeds: dict[Arm, float | None]  # tokens/s
    memory: dict[Arm, float | None]  # MB


@dataclass(frozen=True)
class Ran:
    """What the patch did, from a result file."""

    calls: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, node: Node) -> "Ran":
        return cls(*({key: node[what][key].count() for key in node[what].dict()} for what in ("calls", "fallbacks")))

    def __str__(self) -> str:
        calls = ", ".join(f"{kernel} {n:,} calls" for kernel, n in sorted(self.calls.items())) or "no calls"
        reasons = "; ".join(f"{reason}: {n:,}" for reason, n in sorted(self.fallbacks.items()))
        return f"{calls}, {sum(self.fallbacks.values()):,} fallbacks" + (f" ({reasons})" if reasons else "")


def model(node: Node) -> str:
    """`Qwen2 demo, 1.0 M parameters, float32`."""
    parameters = output.count(node["parameters"].count())
    return f"{node['name'].text()}, {parameters} parameters, {node['dtype'].text()}"


def interrupted(node: Node) -> bool:
    found = node.get("interrupted")
    return found is not None and found.flag()


def trials(node: Node, key: str) -> dict[Arm, list[float]]:
    """That figure of each trial of each arm; none where the file does not tell."""
    found = node.get("trials")
    values: dict[Arm, list[float]] = {name: [] for name in ARMS}
    for trial in found.items() if found else []:
        for name in ARMS:
            of_arm = trial.get(name)
            value = of_arm.get(key) if of_arm else None
            number = value.amount() if value else None
            if number is not None:
                values[name].append(number)
    return values


def arms_apart(node: Node, key: str) -> bool:
    """Whether that figure of the two arms lies apart in their trials."""
    of_arms = trials(node, key)
    return apart(of_arms["off"], of_arms["on"])


def apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ranges from the 20th to the 80th percentile do not overlap. What has no trials is taken as it is."""
    if not one or not other:
        return True
    (low, high), (other_low, other_high) = ([output.percentile(x, share) for share in (0.2, 0.8)] for x in (one, other))
    return high < other_low or other_high < low


def ratio(one: float | None, other: float | None) -> float | None:
    """None if there is nothing to divide, or to divide by."""
    return one / other if one is not None and other else None


def about(parts: Iterable[tuple[str, Node | None]]) -> Html:
    """The settings and the machine as the file has them, each a list of names and values."""
    return tag(
        "div",
        [tag("section", tag("h4", name), facts(_flat(node.dict()))) for name, node in parts if node is not None],
        class_="about",
    )


def _flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            flat += [(f"{key} {name}", text) for name, text in _flat(value)]
        else:
            flat.append((key.replace("_", " "), _in_words(value)))
    return flat


def _in_words(value: Any) -> str:
    match value:
        case None:
            return DASH
        case True | False:
            return "yes" if value else "no"
        case list():
            return ", ".join(map(_in_words, value))
        case str() if value.strip() == "":
            return repr(value)  # a separator of documents
    return str(value)
