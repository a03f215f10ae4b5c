"""The figure of `flash-eval finetune --plot`: step time and memory against the length, a line for each arm."""

from pathlib import Path
from typing import TYPE_CHECKING

from flash_evals import figures
from flash_evals.finetune_result import Length
from flash_evals.measure import ARMS, Arm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: dict[Arm, figures.Style] = {"off": figures.MLX, "on": figures.FLASH}


def draw(path: Path, results: list[Length], title: str) -> None:
    """Raises EvalError if the disk does not take the picture."""
    from matplotlib.figure import Figure

    results = sorted(results, key=lambda result: result.seq_len)
    lengths = [result.seq_len for result in results]
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title)
    time, memory = figure.subplots(1, 2)
    _lines(time, results, "seconds")
    for name in ARMS:
        low, high = ([getattr(result[name], key) for result in results] for key in ("seconds_p20", "seconds_p80"))
        figures.band(time, lengths, low, high, STYLE[name])
    time.set_ylabel("time of a step, median and p20–p80 (s)")
    _lines(memory, results, "peak_memory_mb")
    memory.set_ylabel("memory of a step beyond the model (MB)")
    for ax in (time, memory):
        figures.logarithmic(ax)
        figures.against_length(ax, lengths, "tokens in a sequence")
    figures.save(figure, path)


def _lines(ax: "Axes", results: list[Length], key: str) -> None:
    lengths = [result.seq_len for result in results]
    for name in ARMS:
        ax.plot(lengths, [getattr(result[name], key) for result in results], label=f"patch {name}", **STYLE[name])
