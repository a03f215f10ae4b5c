"""`flash-eval report`: one HTML page of any mix of result files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec

from flash_evals.commands import options
from flash_evals.commands.outputs import save
from flash_evals.pages import finetune_page, kernels_page, perplexity_page, speed_page
from flash_evals.pages.description import Description
from flash_evals.pages.document import document
from flash_evals.results import finetune_result, perplexity_result, speed_result
from flash_evals.results.errors import EvalError, one_line
from flash_evals.results.kernels_result import Entry

Kernels = Annotated[list[Entry], msgspec.Meta(min_length=1)]
Result = perplexity_result.Result | speed_result.Result | finetune_result.Result | Kernels
DESCRIBE: dict[type, Callable[[Any], Description]] = {
    perplexity_result.Result: perplexity_page.description,
    speed_result.Result: speed_page.description,
    finetune_result.Result: finetune_page.description,
    list: kernels_page.description,
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
    """Make one self-contained HTML page of result files, with answers, tables and plots.

    Result files are those that perplexity, speed, finetune and kernels write with --json, in any mix. The page begins
    with four questions and the answers that the files give:

    \b
    Same predictions?     perplexity: yes if the same token ranks first
                          everywhere and the mean ΔNLL is within 1e-4
    Faster?               speed of patch on against off, and of flash against
                          other implementations; a difference counts if the
                          trials of both do not overlap (20th to 80th
                          percentile) or, with fewer than 3 trials, if they are
                          twofold apart
    Less memory?          peak memory, by the same rule as speed
    Does training fit?    finetune: the longest sequence, and the lengths
                          skipped for lack of memory

    Below the answers, the page has each file's figures, plots by length, settings and machine. The page needs no
    network and no script. flash-eval leaves out files that are broken or hold no results, and names them.
    """
    if [file for file in files if file.resolve() == html_file.resolve()]:
        raise EvalError(f"--html {html_file} would overwrite one of the result files")
    found: list[tuple[str, Description]] = []
    left_out: list[tuple[str, str]] = []
    for file in dict.fromkeys(files):
        name = click.format_filename(file)
        try:
            result = msgspec.json.decode(file.read_bytes(), type=Result)
            found.append((name, DESCRIBE[type(result)](result)))
        except OSError as error:
            left_out.append((name, error.strerror or type(error).__name__))
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            left_out.append((name, one_line(error)))
    for name, why in left_out:
        click.echo(f"Left out: {name}: {why}", err=True)
    if not found:
        raise EvalError("none of the files is a result of flash-eval, so no page was made")
    save(html_file, document(found, left_out))
    click.echo(html_file)
