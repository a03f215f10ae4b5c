"""Wrong input is one line that starts with "Error:" and exit code 2, never a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import click


class EvalError(click.ClickException):
    """The message names what was expected and what came; click prints it on stderr."""

    exit_code = 2


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which a batch system ends a run: as Ctrl-C in all but the exit code."""


def exit_code(stopped: KeyboardInterrupt) -> int:
    """As shells have it: 128 and the number of the signal."""
    return 143 if isinstance(stopped, Terminated) else 130


def first_line(error: BaseException) -> str:
    """What a foreign library said, cut to one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def failing(what: str, errors: tuple[type[Exception], ...] = (ValueError, RuntimeError, MemoryError)) -> Iterator[None]:
    """Raises EvalError where a library does not take the work: too little memory, a shape that it does not cover."""
    try:
        yield
    except EvalError:
        raise
    except errors as error:
        raise EvalError(f"{what}: {first_line(error)}") from error
