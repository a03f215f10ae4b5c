"""`flash-eval report`: one HTML page of any mix of result files."""

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from flash_evals import options
from flash_evals.errors import EvalError
from flash_evals.page import doctor, finetune, kernels, perplexity, result_file, speed
from flash_evals.page.document import document
from flash_evals.page.result_file import Node, Unusable
from flash_evals.page.run import Run

READERS: dict[str, Callable[[str, Node], list[Run]]] = {
    "perplexity": perplexity.read,
    "speed": speed.read,
    "finetune": finetune.read,
    doctor.COMMAND: doctor.read,
}


@click.command("report")
@click.argument("files", metavar="RUN.json...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--html",
    "html_file",
    default="report.html",
    show_default=True,
    type=click.Path(path_type=Path),
    callback=options.writable,
    help="Write the page to this file.",
)
def command(files: Sequence[Path], html_file: Path) -> None:
    """One self-contained HTML page of result files: answers, tables and plots.

    The files are those that perplexity, speed, finetune and kernels write with --json, and mlxlm-flash doctor's, in any
    mix. The page begins with four questions and what the files answer:

    \b
    Same predictions?     perplexity: whether the same token ranks first
                          everywhere, and the mean ΔNLL is within 1e-4
    Faster?               all but doctor: speed on over off, if the trials of
                          the two do not overlap (20th to 80th percentile)
    Less memory?          all but doctor: peak memory on over off, likewise
    Does training fit?    finetune: the longest sequence, and what was
                          skipped because it had no memory

    Below are the figures of each file, plots against the length, the settings and the machine. The page needs no
    network and no script. A file that is broken, or of none of these, is left out. The page and stderr name it.
    """
    if [file for file in files if file.resolve() == html_file.resolve()]:
        raise EvalError(f"--html {html_file} is one of the result files, and would be lost")
    runs: list[Run] = []
    left_out: list[tuple[str, str]] = []
    for file in dict.fromkeys(files):
        name = click.format_filename(file)
        try:
            runs += read(file, name)
        except Unusable as error:
            left_out.append((name, str(error)))
    for name, why in left_out:
        click.echo(f"Left out: {name}: {why}", err=True)
    if not runs:
        raise EvalError("none of the files is a result of flash-eval, so there is no page to make")
    try:
        # Half a character pair is valid in JSON, and has no place in UTF-8.
        html_file.write_bytes(document(runs, left_out).encode("utf-8", "replace"))
    except OSError as error:
        raise EvalError(f"cannot write {html_file}: {error.strerror}") from error
    click.echo(html_file)


def read(file: Path, name: str) -> list[Run]:
    """What a result file holds. Raises Unusable."""
    node = result_file.load(file)
    if isinstance(node.value, list):
        return kernels.read(name, node)
    command = node.value.get("command") if isinstance(node.value, dict) else None
    if not isinstance(command, str) or command not in READERS:
        raise Unusable("no result file of flash-eval perplexity, speed, finetune or kernels, or of mlxlm-flash doctor")
    return READERS[command](name, node)
