"""Errors that a user can cause. The command prints one line that starts with "Error:", and exits with status 2."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

FAILURES = (ValueError, RuntimeError, MemoryError)  # of libraries: too little memory, or an unsupported shape
LONGEST = 300  # characters shown of a library's message; the rest is mostly compiler output or lists of names


class EvalError(click.ClickException):
    """An error whose message says what was expected and what was given. click prints it on stderr."""

    exit_code = 2


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, with which batch systems end a run. Handled like Ctrl-C, except for the exit code."""


def exit_code(stopped: KeyboardInterrupt) -> int:
    """128 plus the number of the signal, as in shells."""
    return 143 if isinstance(stopped, Terminated) else 130


def one_line(error: BaseException) -> str:
    """The messages of a library's error and of its causes, as one line. Each message is cut at LONGEST characters."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(str(cause).split()) or type(cause).__name__
        if not any(text in before for before in said):  # most messages contain the message of their cause
            said.append(text)
        cause = cause.__cause__
    return "; caused by: ".join(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in said)


@contextmanager
def failing(what: str, errors: tuple[type[Exception], ...] = FAILURES) -> Iterator[None]:
    """Turns errors of libraries into an EvalError about `what`."""
    try:
        yield
    except EvalError:
        raise
    except errors as error:
        raise EvalError(f"{what}: {one_line(error)}") from error
