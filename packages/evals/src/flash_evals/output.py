"""How results are kept, and what `-o` shows of them."""

import csv
import io
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from flash_evals.errors import EvalError

if TYPE_CHECKING:
    from flash_evals.page.description import Description

FORMATS = ("text", "md", "csv", "json", "jsonl")  # of stdout


def progress(*also: ProgressColumn) -> Progress:
    """A bar on stderr that is gone when the work is done, and is not there at all if nobody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *also)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@dataclass(frozen=True)
class Outputs:
    """Where the results of a command go: a format for stdout, and files."""

    format: str = "text"
    json_file: Path | None = None
    csv_file: Path | None = None

    def deliver(
        self, found: "Description", rows: Sequence[dict[str, Any]], draw: Callable[[], None] | None = None
    ) -> None:
        """The result to the JSON file, `rows` to the CSV file, `draw` for its picture, and one of these, or the page,
        to stdout: neither a full disk nor a closed pipe costs the others their copy. Raises EvalError if the disk does
        not take a file.
        """
        with ExitStack() as rest:  # which runs from the last to the first, and raises what failed
            rest.callback(lambda: click.echo(self._shown(found, rows), nl=False))
            if draw:
                rest.callback(draw)
            if self.csv_file:
                rest.callback(lambda path: _save(path, as_csv(rows)), self.csv_file)
            if self.json_file:
                rest.callback(lambda path: _save(path, as_json(found.result)), self.json_file)

    def _shown(self, found: "Description", rows: Sequence[dict[str, Any]]) -> str:
        match self.format:
            case "json":
                return as_json(found.result)
            case "jsonl":
                return "".join(as_json(row, indent=0) for row in rows)
            case "csv":
                return as_csv(rows)
            case "md":
                return found.markdown()
        return found.text()


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
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise EvalError(f"cannot write {error.filename or path}: {error.strerror}") from error
