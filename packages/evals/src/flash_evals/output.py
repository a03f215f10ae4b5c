"""How results are shown and kept: aligned columns, numbers a person can read, JSON and CSV for programs."""

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from flash_evals.errors import EvalError

FORMATS = ("text", "md", "csv", "json", "jsonl")  # of stdout
Table = Callable[[Sequence[Sequence[str]]], str]  # rows of cells, the first of them the head, to text


def progress(*also: ProgressColumn) -> Progress:
    """A bar on stderr that is gone when the work is done, and is not there at all if nobody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *also)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def columns(rows: Sequence[Sequence[str]], gap: int = 3) -> str:
    """Left-aligned columns, as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("".join(cell.ljust(width + gap) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in padded)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, as llama-bench prints it: the first row is its head."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def _with_line_breaks(page: str) -> str:
    """Lines of prose that follow each other stay lines in Markdown, which would make one paragraph of them."""
    return re.sub(r"(?m)^([^|\n].*)\n(?=[^|\n])", r"\1  \n", page)


def count(n: float) -> str:
    """1.3 M, 494 M, 7.6 B."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if n >= size:
            return f"{n / size:.{0 if n >= 100 * size else 1}f}{unit}"
    return f"{n:.0f}"


def plain(x: float | None, digits: int = 4) -> str:
    """A number with its decimals while that is readable, in scientific notation beyond."""
    if x is None or not math.isfinite(x):
        return "not finite"
    return f"{x:,.{digits}f}" if abs(x) < 1e6 else f"{x:.{digits}e}"


def spread(values: Sequence[float]) -> str:
    """Median and the range from the 20th to the 80th percentile: `1,234 (1,180–1,260)`."""
    low, high = percentile(values, 0.2), percentile(values, 0.8)
    return f"{statistics.median(values):,.0f} ({low:,.0f}–{high:,.0f})"


def duration(seconds: Sequence[float]) -> str:
    """Like `spread`, in the unit that suits the median: `4.21 ms (4.20–4.25)`."""
    middle = statistics.median(seconds)
    size, unit = next(((size, unit) for size, unit in ((1, "s"), (1e-3, "ms")) if middle >= size), (1e-6, "µs"))
    digits = 2 if middle < 10 * size else 1 if middle < 100 * size else 0
    middle, low, high = (x / size for x in (middle, percentile(seconds, 0.2), percentile(seconds, 0.8)))
    return f"{middle:,.{digits}f} {unit} ({low:,.{digits}f}–{high:,.{digits}f})"


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values, as numpy does it."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True)
class Outputs:
    """Where the results of a command go: a format for stdout, and files."""

    format: str = "text"
    json_file: Path | None = None
    csv_file: Path | None = None

    def __post_init__(self) -> None:
        if self.json_file and self.csv_file and self.json_file.resolve() == self.csv_file.resolve():
            raise EvalError(f"--json and --csv are the same file: {self.json_file}")

    def deliver(
        self,
        result: object,
        rows: Sequence[dict[str, Any]],
        page: Callable[[Table], str],
        draw: Callable[[], None] | None = None,
    ) -> None:
        """`result` to the JSON file, `rows` to the CSV file, `draw` for its picture, and one of these, or `page`, to
        stdout: neither a full disk nor a closed pipe costs the others their copy. Raises EvalError if the disk does
        not take a file.
        """
        with ExitStack() as rest:  # which runs from the last to the first, and raises what failed
            rest.callback(lambda: click.echo(self._shown(result, rows, page), nl=False))
            if draw:
                rest.callback(draw)
            if self.csv_file:
                rest.callback(lambda path: _save(path, as_csv(rows)), self.csv_file)
            if self.json_file:
                rest.callback(lambda path: _save(path, as_json(result)), self.json_file)

    def _shown(self, result: object, rows: Sequence[dict[str, Any]], page: Callable[[Table], str]) -> str:
        match self.format:
            case "json":
                return as_json(result)
            case "jsonl":
                return "".join(as_json(row, indent=0) for row in rows)
            case "csv":
                return as_csv(rows)
            case "md":
                return _with_line_breaks(page(markdown)) + "\n"
        return page(columns) + "\n"


def as_json(result: object, indent: int = 2) -> str:
    """On one line if `indent` is 0."""
    return msgspec.json.format(msgspec.json.encode(result), indent=indent).decode() + "\n"


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, newline="")
    except OSError as error:
        raise EvalError(f"cannot write {error.filename or path}: {error.strerror}") from error
