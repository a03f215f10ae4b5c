"""Where a command's result goes: a page on stdout, and a file that keeps all of it."""

from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from flash_evals.pages.description import Description
from flash_evals.results.errors import EvalError

FORMATS = ("text", "md", "json")  # of stdout


@dataclass(frozen=True)
class Outputs:
    """A format for stdout, and a file."""

    format: str = "text"
    json_file: Path | None = None

    def deliver(self, found: Description) -> None:
        """The result to the JSON file, and in one of the formats to stdout: neither a full disk nor a closed pipe costs
        the other its copy. Raises EvalError if the disk does not take the file.
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
    """Raises EvalError if the disk does not take the file."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise EvalError(f"cannot write {error.filename or path}: {error.strerror}") from error
