"""Where a command's result goes: a page on stdout, and a JSON file with all figures."""

from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from flash_evals.pages.description import Description
from flash_evals.results.errors import EvalError

FORMATS = ("text", "md", "json")  # of stdout


@dataclass(frozen=True)
class Outputs:
    """The format of stdout, and the JSON file, if any."""

    format: str = "text"
    json_file: Path | None = None

    def deliver(self, found: Description) -> None:
        """Writes the result to the JSON file, if there is one, and to stdout in `format`. If the file cannot be
        written, stdout gets the result nevertheless, and EvalError is raised.
        """
        try:
            if self.json_file:
                save(self.json_file, as_json(found.result))
        finally:
            click.echo(self._shown(found), nl=False)

    def _shown(self, found: Description) -> str:
        match self.format:
            case "json":
                return as_json(found.result)
            case "md":
                return found.markdown()
        return found.text()


def as_json(result: object) -> str:
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def save(path: Path, text: str) -> None:
    """Writes the text to the file. Raises EvalError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise EvalError(f"cannot write {error.filename or path}: {error.strerror}") from error
