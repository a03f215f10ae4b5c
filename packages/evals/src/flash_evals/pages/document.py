"""The page of `flash-eval report`: fills the template report.html."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from msgspec import to_builtins

from flash_evals.pages import answers, colors, drawing
from flash_evals.pages.chart import Chart
from flash_evals.pages.description import Description
from flash_evals.pages.units import DASH
from flash_evals.results.claims import LEGEND

HEADINGS = {
    "perplexity": "Predictions",
    "speed": "Prompts and generation",
    "finetune": "Training",
    "kernels": "The kernels alone",
}


def document(found: Sequence[tuple[str, Description]], left_out: Sequence[tuple[str, str]]) -> str:
    """Returns the HTML. found: at least one (file name, description). left_out: (file name, why it was left out)."""
    described = [each for _, each in found]
    environment = Environment(loader=PackageLoader("flash_evals.pages", ""), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html").render(
        cards=answers.cards(described),
        anchors={each: f"run-{number}" for number, each in enumerate(described, 1)},
        sections=[
            (heading, [(file, each, _of_several_lengths(each)) for file, each in found if each.command == command])
            for command, heading in HEADINGS.items()
            if any(each.command == command for each in described)
        ],
        left_out=left_out,
        about=_about,
        picture=drawing.picture,
        legend=LEGEND,
        dash=DASH,
        light=colors.LIGHT,
        dark=colors.DARK,
        where_dark=colors.WHERE_DARK,
        style=files("flash_evals.pages").joinpath("style.css").read_text(encoding="utf-8"),
        version=version("flash-evals"),
    )
    return page + "\n"


def _of_several_lengths(described: Description) -> list[tuple[str, list[Chart]]]:
    """The rows of charts. Charts with a single length are left out, because each line would be a point."""
    return [(title, [chart for chart in charts if len(chart.lengths) > 1]) for title, charts in described.charts]


def _about(described: Description) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each part of `about`, such as the settings: its title and its (name, value) pairs."""
    return [(name, _flat(to_builtins(part))) for name, part in described.about.items() if part is not None]


def _flat(values: Mapping[str, Any]) -> list[tuple[str, str]]:
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
            return repr(value)  # the separator of documents, which is white space
    return str(value)
