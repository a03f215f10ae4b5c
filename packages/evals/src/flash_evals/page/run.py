"""What the page knows of one measurement, whichever command made it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flash_evals import claims, output
from flash_evals.claims import Ratio
from flash_evals.measure import ARMS, Arm
from flash_evals.page.html import DASH, Content, Html, facts, figure, tag
from flash_evals.page.result_file import Node

MLX = ("off", "mlx")  # what is MLX's own attention


@dataclass(frozen=True)
class Comparison:
    """Flash and another on the same work."""

    work: str
    against: str  # "off", or an implementation
    speed: Ratio  # so many times as fast is flash
    memory: Ratio  # flash's part of the other's


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


def ratio(node: Node, key: str, value: float | None) -> Ratio:
    """Of that figure, which both arms have in each trial."""
    return Ratio.of(value, *trials(node, key).values())


def times(ratio: Ratio) -> Content:
    """As tables show it, with a mark where it claims nothing."""
    return [figure(ratio.value, claims.times), ratio.mark]


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
