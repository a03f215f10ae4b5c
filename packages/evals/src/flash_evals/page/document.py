"""The whole page: the answers first, then what they are made of."""

from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files

from flash_evals.claims import MARK
from flash_evals.page import answers, doctor, perplexity
from flash_evals.page.drawing import COLORS
from flash_evals.page.html import Html, join, tag
from flash_evals.page.run import Run

HEADINGS = {
    "perplexity": "Predictions",
    "speed": "Prompts and generation",
    "finetune": "Training",
    "kernels": "The kernels alone",
    doctor.COMMAND: "What mlxlm-flash doctor found",
}
# Whatever a result file holds, the page loads nothing and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
LEAD = "mlx-lm's own attention beside flash attention: the same model on the same tokens, patch off and patch on."
HOW = (
    "A ratio is on over off, or flash over another. Faster, slower, less and more are said where the trials of the two "
    f"do not overlap, from the 20th to the 80th percentile. {MARK} behind a ratio means that they do: nothing is "
    "claimed. Predictions are the same where the same token ranks first everywhere and the mean ΔNLL is within 1e-4. "
    "Peak memory is what the work needs beyond what was there before it. MB are 10⁶ bytes. – is a figure that is not "
    "finite or not known."
)


def document(runs: Sequence[Run], left_out: Sequence[tuple[str, str]]) -> Html:
    """`left_out`: file names, and why each has no place on the page. There is at least one run."""
    anchors = {id(run): f"run-{number}" for number, run in enumerate(runs, 1)}
    cards = [answers.card(answer, lambda run: anchors[id(run)]) for answer in answers.answers(runs)]
    sections = [
        tag(
            "section",
            tag("h2", heading),
            [_article(run, anchors[id(run)]) for run in runs if run.command == command],
            perplexity.against_context(runs) if command == "perplexity" else [],
        )
        for command, heading in HEADINGS.items()
        if any(run.command == command for run in runs)
    ]
    head = tag(
        "head",
        Html('<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'),
        Html('<meta name="color-scheme" content="light dark"/>'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>'),
        tag("title", "Flash attention, off and on"),
        tag("style", Html(COLORS + files("flash_evals.page").joinpath("style.css").read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        tag("header", tag("h1", "Flash attention, off and on"), tag("p", LEAD)),
        tag(
            "main",
            tag("div", cards, class_="cards"),
            tag("p", HOW, class_="note"),
            _left_out(left_out),
            sections,
        ),
        tag("footer", f"Made by flash-eval report {version('flash-evals')}."),
    )
    return join([Html("<!DOCTYPE html>\n"), tag("html", head, body, lang="en"), Html("\n")])


def _left_out(files: Sequence[tuple[str, str]]) -> Html:
    if not files:
        return Html()
    names = [tag("li", tag("code", name), ": ", why) for name, why in files]
    return tag("section", tag("h2", "Left out"), tag("ul", names), class_="left-out")


def _article(run: Run, anchor: str) -> Html:
    notes = []
    if not run.ran:
        notes.append("The patch never ran: what is called on is MLX's own attention, too.")
    if run.interrupted:
        notes.append("Interrupted: the figures are of what was finished.")
    return tag(
        "article",
        tag("h3", run.title),
        tag("p", " · ".join(run.facts), class_="facts"),
        [tag("p", note, class_="note strong") for note in notes],
        run.body,
        tag("details", tag("summary", "Settings and machine"), tag("p", "File: ", tag("code", run.file)), run.about),
        id=anchor,
    )
