"""The text of `-h` fits into a terminal, and explains each figure of a page."""

import inspect
import re
from copy import deepcopy

import click
import pytest
from flash_evals.cli import COMMANDS, main
from flash_evals.commands.report import DESCRIBE, Result
from msgspec import convert


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_fits(name):
    """Lines that click does not wrap fit into 80 columns, although click indents them by two columns."""
    blocks = inspect.cleandoc(main.get_command(click.Context(main), name).help).split("\n\n")
    lines = [line for block in blocks if block.startswith("\b") for line in block.splitlines()]
    assert [line for line in lines if len(line) > 78] == []


# Labels on the pages that are not headings of columns or rows.
FIGURES = {
    "perplexity": ["ΔNLL", "top-1 agreement", "max |Δlogit|", "mean KL", "Same predictions", "flash:", "fallbacks"],
    "speed": ["tg4 @ d32", "±", "flash:", "fallbacks"],
    "finetune": ["on/off", "max |Δ|", "flash:", "fallbacks"],
    "kernels": ["peak ", "reads ", "faster", "flash against"],
}
EXAMPLES = {"tg4 @ d32": "tg32 @ d2048"}  # label -> the example in the help that explains it
ARM = re.compile(r"^(patch )?(off|on)( |$)|( |^)(off|on)$")


def labels(page):
    """The column heads of a Markdown page, and its row heads if the first column has no head."""
    rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in page.splitlines() if line.startswith("| ")]
    head, _, *body = rows
    return head if head[0] else [*head, *(row[0] for row in body)]


@pytest.mark.parametrize("name", FIGURES)
def test_the_help_explains_every_figure(invoke, results, name):
    """For a decode step, the page of `kernels` has other figures. So that page is checked, too."""
    explained = " ".join(invoke(name, "-h").output.split())

    def page_of(result):
        found = convert(result, Result)
        page = DESCRIBE[type(found)](found).markdown().replace("\\|", "|")
        for label in labels(page):
            assert ARM.sub("", label) in explained, f"{name} -h does not say what {label!r} is"
        return page

    page = page_of(results[name])
    for label in FIGURES[name]:
        assert label in page
        assert EXAMPLES.get(label, label).strip() in explained, f"{name} -h does not say what {label!r} is"
    if name == "kernels":
        [decode] = deepcopy(results[name][:1])
        decode["config"]["query_len"] = 1
        assert "K/V GB/s" in page_of([decode])
