"""The page of `flash-eval report`: fills the template report.html."""

from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

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


def _about(described: Description) -> str:
    """The settings and the machine, as in the result file."""
    return msgspec.json.format(msgspec.json.encode(described.about), indent=2).decode()
