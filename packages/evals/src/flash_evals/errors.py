"""Wrong input is one line that starts with "Error:" and exit code 2, never a traceback."""

import click


class EvalError(click.ClickException):
    """The message names what was expected and what came; click prints it on stderr."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """What a foreign library said, cut to one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
