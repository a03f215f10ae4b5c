"""Errors of users: one line that starts with "Error:", and exit code 2. No traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

LONGEST = 300  # characters of a foreign message: what comes after them is a listing, of a compiler or of names


class EvalError(click.ClickException):
    """The message names what was expected and what came; click prints it on stderr."""

    exit_code = 2


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which a batch system ends a run: as Ctrl-C in all but the exit code."""


def exit_code(stopped: KeyboardInterrupt) -> int:
    """As shells have it: 128 and the number of the signal."""
    return 143 if isinstance(stopped, Terminated) else 130


def one_line(error: BaseException) -> str:
    """The messages of a library's error and of its causes, as one line; each is cut at LONGEST characters."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(str(cause).split()) or type(cause).__name__
        if not any(text in before for before in said):  # most messages repeat their cause's
            said.append(text)
        cause = cause.__cause__
    return "; caused by: ".join(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in said)


@contextmanager
def failing(what: str, errors: tuple[type[Exception], ...] = (ValueError, RuntimeError, MemoryError)) -> Iterator[None]:
    """Raises EvalError where a library does not take the work: too little memory, a shape that it does not cover."""
    try:
        yield
    except EvalError:
        raise
    except errors as error:
        raise EvalError(f"{what}: {one_line(error)}") from error
