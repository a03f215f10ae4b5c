"""The whole page of `report`: the answers first, then what they are made of."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from msgspec import to_builtins

from flash_evals import perplexity_result
from flash_evals.claims import LEGEND
from flash_evals.page import answers, drawing, patch_doctor, perplexity
from flash_evals.page.description import Description
from flash_evals.page.html import Html, join, table, tag
from flash_evals.page.units import DASH

HEADINGS = {
    "perplexity": "Predictions",
    "speed": "Prompts and generation",
    "finetune": "Training",
    "kernels": "The kernels alone",
    patch_doctor.COMMAND: "What mlxlm-flash doctor found",
}
# Whatever a result file holds, the page loads nothing and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
TITLE = "Flash attention, off and on"
LEAD = "mlx-lm's own attention beside flash attention: the same model on the same tokens, patch off and patch on."
HOW = (
    "A ratio is on over off, or flash over another. Faster, slower, less and more are said where the trials of the two "
    f"lie apart. {LEGEND} Predictions are the same where the same token ranks first everywhere and the mean ΔNLL is "
    f"within 1e-4. Peak memory is what the work needs beyond what was there before it. MB are 10⁶ bytes. {DASH} is a "
    "figure that is not finite or not known."
)


def document(found: Sequence[tuple[str, Description]], left_out: Sequence[tuple[str, str]]) -> Html:
    """`found`: file names, and what is in them, at least one; `left_out`: others, and why they have no place."""
    described = [each for _, each in found]
    anchors = {id(each): f"run-{number}" for number, each in enumerate(described, 1)}
    cards = answers.cards(described, lambda each: anchors[id(each)])
    sections = [
        tag(
            "section",
            tag("h2", heading),
            [_article(file, each, anchors[id(each)]) for file, each in found if each.command == command],
            _against_context(described) if command == "perplexity" else [],
        )
        for command, heading in HEADINGS.items()
        if any(each.command == command for each in described)
    ]
    style = files("flash_evals.page").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        Html('<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'),
        Html('<meta name="color-scheme" content="light dark"/>'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>'),
        tag("title", TITLE),
        tag("style", Html(drawing.STYLESHEET + style)),
    )
    main = [tag("div", cards, class_="cards"), tag("p", HOW, class_="note"), _left_out(left_out), sections]
    body = tag(
        "body",
        tag("header", tag("h1", TITLE), tag("p", LEAD)),
        tag("main", main),
        tag("footer", f"Made by flash-eval report {version('flash-evals')}."),
    )
    return join([Html("<!DOCTYPE html>\n"), tag("html", head, body, lang="en"), Html("\n")])


def _left_out(files: Sequence[tuple[str, str]]) -> Html:
    if not files:
        return Html()
    names = [tag("li", tag("code", name), ": ", why) for name, why in files]
    return tag("section", tag("h2", "Left out"), tag("ul", names), class_="left-out")


def _article(file: str, described: Description, anchor: str) -> Html:
    return tag(
        "article",
        tag("h3", described.title),
        tag("p", " · ".join(described.facts), class_="facts"),
        [tag("p", warning, class_="note strong") for warning in described.warnings],
        [table(each) for each in described.tables],
        [tag("p", note, class_="note") for note in described.notes],
        [drawing.row(title, charts) for title, charts in described.charts],
        tag(
            "details", tag("summary", "Settings and machine"), tag("p", "File: ", tag("code", file)), _about(described)
        ),
        id=anchor,
    )


def _against_context(found: Sequence[Description]) -> list[Html]:
    results = [each.result for each in found if isinstance(each.result, perplexity_result.Result)]
    return [
        tag("article", tag("h3", "Against the context"), tag("p", shared, class_="facts"), drawing.row("", charts))
        for shared, charts in perplexity.against_context(results)
    ]


def _about(described: Description) -> Html:
    """The settings and the machine as the file has them, each a list of names and values."""
    parts = [(name, _flat(to_builtins(part))) for name, part in described.about.items() if part is not None]
    lists = [
        tag("section", tag("h4", name), tag("dl", [tag("div", tag("dt", key), tag("dd", what)) for key, what in part]))
        for name, part in parts
    ]
    return tag("div", lists, class_="about")


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
            return repr(value)  # a separator of documents
    return str(value)
