"""The figure of `flash-eval kernels --plot`: time, memory and speed against the length, one line an implementation."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from flash_evals import figures
from flash_evals.kernel_results import Entry, kind, passes_of
from flash_evals.workload import Pass

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = dict[str, list[Entry]]  # implementation -> its line

STYLE: dict[str, figures.Style] = {
    "flash": figures.FLASH,
    "mlx": figures.MLX,
    # Near mlx where both run on the same products: dotted and hollow, it hides nothing.
    "naive": {"color": "#009E73", "marker": "^", "linestyle": ":", "fillstyle": "none"},
    "torch": {"color": "#CC79A7", "marker": "D"},
}
BOUND: figures.Style = {"color": "#555555", "linestyle": "--", "linewidth": 1.2, "label": "bound or reference"}


def draw(path: Path, entries: Sequence[Entry]) -> None:
    """Raises EvalError if the disk does not take the picture."""
    from matplotlib.figure import Figure

    panels = _panels(entries)
    figure = Figure(figsize=(13, 1 + 3.9 * len(panels)), layout="constrained")
    figure.suptitle(_title(entries))
    axes = figure.subplots(len(panels), 3, squeeze=False)
    for row, (title, pass_, by_impl) in zip(axes, panels, strict=True):
        row[0].set_title(title, loc="left", fontweight="bold")
        for ax, draw_one in zip(row, (_draw_time, _draw_memory, _draw_speed), strict=True):
            draw_one(ax, by_impl, pass_)
            _finish(ax, by_impl)
    figures.save(figure, path)


def _panels(entries: Sequence[Entry]) -> list[tuple[str, Pass, Series]]:
    """A row of panels for each shape, dtype and pass, with its title."""
    several = len(passes_of(entries)) > 1
    groups = groupby(entries, key=lambda entry: f"{entry.config.shape}, {entry.config.storage}")
    return [
        (f"{title}, {pass_}" if several else title, pass_, _series(of_panel, pass_))
        for title, of_panel in ((title, list(group)) for title, group in groups)
        for pass_ in passes_of(of_panel)
    ]


def _series(entries: Sequence[Entry], pass_: Pass) -> Series:
    """For each implementation its entries by growing length."""
    by_impl: Series = {}
    for entry in sorted(entries, key=lambda entry: entry.config.seq_len):
        if pass_ in entry.passes:
            by_impl.setdefault(entry.config.impl, []).append(entry)
    return by_impl


def _title(entries: Sequence[Entry]) -> str:
    machine = entries[0].machine
    return f"{kind(entries)} · {machine.processor}, {machine.device}"


def _draw_time(ax: "Axes", by_impl: Series, pass_: Pass) -> None:
    for name, entries in by_impl.items():
        _line(ax, name, entries, [entry.passes[pass_].time * 1e3 for entry in entries])
        low = [entry.passes[pass_].time_p20 * 1e3 for entry in entries]
        high = [entry.passes[pass_].time_p80 * 1e3 for entry in entries]
        figures.band(ax, _lengths(entries), low, high, STYLE[name])
    figures.logarithmic(ax)
    ax.set_ylabel("time of a call, median and p20–p80 (ms)")


def _draw_memory(ax: "Axes", by_impl: Series, pass_: Pass) -> None:
    for name, entries in by_impl.items():
        _line(ax, name, entries, [entry.passes[pass_].peak_memory for entry in entries])
    _bound(ax, by_impl, "inputs and outputs", lambda entry: entry.passes[pass_].held)
    figures.logarithmic(ax)
    ax.set_ylabel("memory of a call beyond its inputs (MB)")


def _draw_speed(ax: "Axes", by_impl: Series, pass_: Pass) -> None:
    decode = any(entry.config.is_decode for entries in by_impl.values() for entry in entries)
    for name, entries in by_impl.items():
        _line(ax, name, entries, [entry.speed(pass_) for entry in entries])
    _bound(
        ax, by_impl, "reading from memory" if decode else "multiply-adds in registers", lambda entry: entry.speed_bound
    )
    ax.margins(y=0.1)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("keys and values read (GB/s)" if decode else "GFLOP/s")


def _line(ax: "Axes", name: str, entries: Sequence[Entry], values: Sequence[float]) -> None:
    ax.plot(_lengths(entries), values, label=name, **STYLE[name])


def _bound(ax: "Axes", by_impl: Series, name: str, value: Callable[[Entry], float | None]) -> None:
    """What the machine or the problem sets: the same for each implementation, and for none known on a GPU."""
    entries = max(by_impl.values(), key=len)
    values = [bound for entry in entries if (bound := value(entry)) is not None]
    if values:
        lengths = _lengths(entries)
        ax.plot(lengths, values, **BOUND)
        end = (lengths[-1], values[-1])
        ax.annotate(name, end, (0, 5), textcoords="offset points", ha="right", fontsize="small")


def _lengths(entries: Sequence[Entry]) -> list[int]:
    return [entry.config.seq_len for entry in entries]


def _finish(ax: "Axes", by_impl: Series) -> None:
    lengths = sorted({length for entries in by_impl.values() for length in _lengths(entries)})
    figures.against_length(ax, lengths, "keys")
