"""What the figures of `--plot` share: the option, axes against the length, and a file at the end."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flash_evals import options
from flash_evals.errors import EvalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = dict[str, Any]

# Colours that colour-blind people tell apart (Okabe and Ito 2008), and a marker each for print without colour.
FLASH: Style = {"color": "#0072B2", "marker": "o"}
MLX: Style = {"color": "#E69F00", "marker": "s"}


def plot_file(text: str) -> Callable[..., Any]:
    return click.option("--plot", "plot_file", type=click.Path(path_type=Path), callback=drawable, help=text)


def drawable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Checks an option's file name, and that there is something to draw with, before any work starts."""
    path = options.writable(context, parameter, value)
    if path is None:
        return None
    if path.suffix not in (".png", ".svg"):
        raise EvalError(f"{parameter.opts[0]} {path}: expected a name that ends in .png or .svg")
    if not find_spec("matplotlib"):
        raise EvalError(f"{parameter.opts[0]} needs matplotlib: pip install 'matplotlib>=3.9,<4'")
    return path


def band(ax: "Axes", lengths: Sequence[int], low: Sequence[float], high: Sequence[float], style: Style) -> None:
    """The spread around a line of that style."""
    ax.fill_between(lengths, low, high, color=style["color"], alpha=0.2, linewidth=0)


def logarithmic(ax: "Axes") -> None:
    """Labels at 1, 2, 5, 10: a panel may span less than a power of ten. A memory of 0 has no place and is left out."""
    ax.set_yscale("log", nonpositive="mask", subs=(2, 5))
    ax.margins(y=0.1)
    for axis_format in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        axis_format("{x:g}")


def against_length(ax: "Axes", lengths: Sequence[int], label: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.set_xlabel(label)
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.xaxis.minorticks_off()


def save(figure: "Figure", path: Path) -> None:
    """With one legend for all panels. Raises EvalError if the disk does not take the picture."""
    lines = {line.get_label(): line for ax in figure.axes for line in ax.lines}
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=len(lines))
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise EvalError(f"cannot write {path}: {error.strerror}") from error
