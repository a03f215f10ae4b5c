"""How the commands measure: a bar on stderr while it works, and whatever ends it too early keeps what is measured."""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import TypeVar

from rich.progress import TextColumn

from flash_evals import output
from flash_evals.errors import exit_code

Item = TypeVar("Item")
Stopped = Exception | KeyboardInterrupt | None  # what ended the work too early


def collect(
    work: Generator[Item, None, None],
    what: str,
    total: int,
    before: Iterable[Item] = (),
    size: Callable[[Item], int] = lambda item: 1,
    status: Callable[[Item], str] = lambda item: "",
) -> tuple[list[Item], Stopped]:
    """All items of the work, behind those that were there `before`, and what ended it too early.

    If there is no item at all, that is raised. The bar grows by the `size` of each item, and shows its `status`.
    """
    items = list(before)
    try:
        with closing(work), output.progress(TextColumn("{task.fields[status]}")) as progress:
            bar = progress.add_task(what, total=total, completed=sum(map(size, items)), status="")
            for item in work:
                items.append(item)
                progress.update(bar, advance=size(item), status=status(item))
    except (Exception, KeyboardInterrupt) as error:
        if not items:
            raise
        return items, error
    return items, None


def end(stopped: Stopped) -> None:
    """After the results are delivered: exit code 130 behind Ctrl-C, 143 behind SIGTERM, and an error is not hidden."""
    if isinstance(stopped, KeyboardInterrupt):
        sys.exit(exit_code(stopped))
    if stopped:
        raise stopped
