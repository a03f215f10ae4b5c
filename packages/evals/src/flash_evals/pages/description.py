"""Describes a command's result. The text, Markdown and HTML pages are all made from this description."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar

from flash_evals.pages.chart import Chart
from flash_evals.results.claims import LEGEND, MARK, Ratio

Item = TypeVar("Item")
Key = TypeVar("Key")


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: Sequence[int] = (1,)  # rows begin with groups of cells of these sizes; `texts` never blanks the last group

    @property
    def texts(self) -> list[list[str]]:
        """The head and the rows. Leading groups of cells that repeat the row above are blank."""
        shown = [list(row) for row in self.rows]
        for (above, row), cells in zip(pairwise(self.rows), shown[1:], strict=True):
            for first, end in pairwise(accumulate(self.names[:-1], initial=0)):
                if above[first:end] != row[first:end]:
                    break
                cells[first:end] = [""] * (end - first)
        return [list(self.head), *shown]


@dataclass(frozen=True)
class Comparison:
    """Compares flash with something else that did the same work."""

    work: str
    against: str  # "off": the patch off; else an implementation's name
    speed: Ratio  # flash's speed / the other's speed
    memory: Ratio  # flash's memory / the other's memory


@dataclass(frozen=True, eq=False)
class Description:
    result: object
    facts: Sequence[str]  # model, settings that matter, machine
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    ran: bool = True  # whether flash ran
    only: str = ""  # if the run was interrupted: which work was finished, such as "trials"
    # Only for the HTML page:
    command: str = ""
    title: str = ""
    charts: Sequence[tuple[str, Sequence[Chart]]] = ()  # the title and the charts of each row
    comparisons: Sequence[Comparison] = ()
    about: Mapping[str, object] = field(default_factory=dict)  # all settings, and the machine

    @property
    def warnings(self) -> list[str]:
        """Sentences that a reader must know before the figures."""
        never_ran = "The patch never ran: MLX's own attention computed everything."
        interrupted = f"The run was interrupted: the figures are of the {self.only} that were finished."
        return [never_ran] * (not self.ran) + [interrupted] * bool(self.only)

    def text(self) -> str:
        return self._lines(columns)

    def markdown(self) -> str:
        """Returns Markdown. Lines of prose end with two spaces, because Markdown would otherwise join the lines."""
        return re.sub(r"(?m)^([^|\n].*)\n(?=[^|\n])", r"\1  \n", self._lines(markdown))

    def _lines(self, table: Callable[[Sequence[Sequence[str]]], str]) -> str:
        tables = [table(each.texts) for each in self.tables]
        legend = [LEGEND] if MARK in "".join(tables) else []
        closing = [*legend, *self.notes, *self.warnings]
        return "\n\n".join(filter(None, (" · ".join(self.facts), *tables, "\n".join(closing)))) + "\n"


def columns(rows: Sequence[Sequence[str]], gap: int = 3) -> str:
    """Left-aligned columns, as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("".join(cell.ljust(width + gap) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, in llama-bench's format: the first row is the head."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Groups items by key, in the order in which the keys first appear."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
