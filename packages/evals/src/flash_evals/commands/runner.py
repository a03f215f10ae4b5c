"""Runs a command's work and shows a progress bar. A run that ends early keeps its finished items."""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from flash_evals.results.errors import exit_code
from flash_evals.results.provenance import Machine

Item = TypeVar("Item")
Stopped = Exception | KeyboardInterrupt | None  # what ended the work early


def say_what_bounds(described: Machine) -> None:
    """Warns on stderr if the machine's BLAS limits all speeds. Call it before the work."""
    for line in described.bounds:
        click.echo(line, err=True)


def progress(*also: ProgressColumn) -> Progress:
    """A progress bar on stderr, cleared when the work is done; none if stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *also)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def collect(
    work: Generator[Item, None, None],
    what: str,
    total: int,
    before: Iterable[Item] = (),
    size: Callable[[Item], int] = lambda item: 1,
    status: Callable[[Item], str] = lambda item: "",
) -> tuple[list[Item], Stopped]:
    """Returns the items of `before` and of `work` in one list, and the exception that ended `work` early, if any.

    If there are no items, raises that exception instead. The bar advances by each item's `size` and shows its `status`.
    """
    items = list(before)
    try:
        with closing(work), progress(TextColumn("{task.fields[status]}")) as shown:
            bar = shown.add_task(what, total=total, completed=sum(map(size, items)), status="")
            for item in work:
                items.append(item)
                shown.update(bar, advance=size(item), status=status(item))
    except (Exception, KeyboardInterrupt) as error:
        if not items:
            raise
        return items, error
    return items, None


def end(stopped: Stopped) -> None:
    """Exits with 130 after Ctrl-C and 143 after SIGTERM, or raises the error. Call it after printing results."""
    if isinstance(stopped, KeyboardInterrupt):
        sys.exit(exit_code(stopped))
    if stopped:
        raise stopped
