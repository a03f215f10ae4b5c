"""What the page knows of one measurement, whichever command made it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import to_builtins

from flash_evals import claims, output
from flash_evals.claims import Ratio
from flash_evals.models import Model
from flash_evals.page.html import DASH, Content, Html, facts, figure, tag
from flash_evals.result import ModelResult

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
    read: Any = None  # of perplexity the result, if both arms ran together


@dataclass(frozen=True)
class Predictions:
    same: bool | None  # None: not known
    says: Content


@dataclass(frozen=True)
class Training:
    longest: int  # tokens
    skipped: Sequence[str]  # lengths that had no memory, and why, in words
    says: Content


def of_arms(
    file: str,
    result: ModelResult,
    title: str,
    about_it: Sequence[str],
    body: Sequence[Html],
    figures: Sequence[tuple[str, Content]] = (),
    parts: Sequence[str] = ("model", "settings", "machine"),
    patched: bool = True,
    **said: Any,
) -> Run:
    """A run of a model; `patched` is whether an arm of it had the patch on."""
    return Run(
        file,
        str(result.__struct_config__.tag),
        title,
        [model(result.model), *about_it, result.machine.device],
        [*body, facts([*figures, ("flash", str(result.flash))])],
        about((part, getattr(result, part)) for part in parts),
        bool(result.flash.calls) or not patched,
        result.interrupted,
        **said,
    )


def model(described: Model) -> str:
    """`Qwen2 demo, 1.0 M parameters, float32`."""
    return f"{described.name}, {output.count(described.parameters)} parameters, {described.dtype}"


def times(ratio: Ratio) -> Content:
    """As tables show it, with a mark where it claims nothing."""
    return [figure(ratio.value, claims.times), ratio.mark]


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """In the order in which the keys come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def about(parts: Iterable[tuple[str, object]]) -> Html:
    """The settings and the machine as the file has them, each a list of names and values."""
    described = [(name, to_builtins(part)) for name, part in parts if part is not None]
    return tag("div", [tag("section", tag("h4", name), facts(_flat(part))) for name, part in described], class_="about")


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
