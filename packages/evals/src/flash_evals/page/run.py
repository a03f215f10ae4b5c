"""What the page knows of one measurement, whichever command made it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flash_evals import claims, output
from flash_evals.claims import Ratio
from flash_evals.measure import ARMS, Arm
from flash_evals.page.html import DASH, Content, Html, facts, figure, tag
from flash_evals.page.result_file import Node, amount

Item = TypeVar("Item")
Key = TypeVar("Key")

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
    """Of a text in windows: what runs of several contexts have in common, and the file."""

    shared: str
    file: Node


def of_arms(
    file: str,
    node: Node,
    title: str,
    about_it: Sequence[str],
    body: Sequence[Html],
    figures: Sequence[tuple[str, Content]] = (),
    parts: Sequence[str] = ("model", "settings", "machine"),
    patched: bool = True,
    **said: Any,
) -> Run:
    """A run of a model; `patched` is whether an arm of it had the patch on."""
    calls, fallbacks = (
        {key: node["flash"][what][key].count() for key in node["flash"][what].dict()} for what in ("calls", "fallbacks")
    )
    ran = ", ".join(f"{kernel} {n:,} calls" for kernel, n in sorted(calls.items())) or "no calls"
    reasons = "; ".join(f"{reason}: {n:,}" for reason, n in sorted(fallbacks.items()))
    flash = f"{ran}, {sum(fallbacks.values()):,} fallbacks" + (f" ({reasons})" if reasons else "")
    return Run(
        file,
        node["command"].text(),
        title,
        [model(node["model"]), *about_it, node["machine"]["device"].text()],
        [*body, facts([*figures, ("flash", flash)])],
        about((part, node.get(part)) for part in parts),
        bool(calls) or not patched,
        interrupted(node),
        **said,
    )


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
    arms = [(name, trial.get(name)) for trial in (found.items() if found else []) for name in ARMS]
    values = [(name, amount(arm, key)) for name, arm in arms if arm]
    return {name: [value for of, value in values if of == name and value is not None] for name in ARMS}


def ratio(node: Node, key: str, value: float | None) -> Ratio:
    """Of that figure, which both arms have in each trial."""
    return Ratio.of(value, *trials(node, key).values())


def times(ratio: Ratio) -> Content:
    """As tables show it, with a mark where it claims nothing."""
    return [figure(ratio.value, claims.times), ratio.mark]


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """In the order in which the keys come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


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
