"""Draws the README's picture: tokens/s with the patch off and on, a pair of bars for each result file.

    uv run packages/evals/scripts/draw_gains.py docs/pictures/gains.svg TITLE=FILE ...

FILE is what `flash-eval speed --json` or `flash-eval finetune --json` wrote, of one test. Each pair has its own scale.
"""

import json
from pathlib import Path
from typing import Any

import click
from flash_evals.pages.colors import LIGHT
from flash_evals.pages.drawing import STYLE, svg_of

WIDTH, HEIGHT = 530 / 72, 96 / 72  # size of a pair of bars, in inches: readable at a phone's width
BAR, LETTERS = 0.62, 13
ROOM = 1.6  # length of the axis / length of the longest bar; leaves room for the text beside the bar


def gain(test: dict[str, Any]) -> float:
    """Speed with the patch on, divided by speed with the patch off. The command prints the same ratio."""
    return test["ratio"] if "ratio" in test else 1 / test["time_ratio"]


def speed_of(arm: dict[str, Any]) -> float:
    """Tokens/s of one arm. If the result file has medians, these are used, because gain() is a ratio of medians."""
    return arm.get("tokens_per_s_median", arm["tokens_per_s"])


def in_words(speed: float, memory: float, times: float | None) -> str:
    size = f"{memory / 1000:.1f} GB" if memory >= 1000 else f"{memory:.0f} MB"
    beside = f", {times:.1f}x" if times and times >= 2 else f", {times:.2f}x" if times else ""
    return f"{speed:,.0f} tokens/s{beside} · {size}"


def draw(titles: list[str], results: list[dict[str, Any]]) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.style import context

    with context(["default", {**STYLE, "axes.grid": False, "font.size": LETTERS}]):
        drawn = Figure((WIDTH, HEIGHT * len(results)), layout="constrained")
        for ax, title, result in zip(
            drawn.subplots(len(results), 1, squeeze=False)[:, 0], titles, results, strict=True
        ):
            (test,) = result["results"]
            longest = max(speed_of(test[arm]) for arm in ("off", "on"))
            for row, arm in enumerate(("off", "on")):
                speed, memory = speed_of(test[arm]), test[arm]["peak_memory_mb"]
                words = in_words(speed, memory, gain(test) if arm == "on" else None)
                ax.barh(row, speed, BAR, color=LIGHT[arm])
                ax.text(speed + longest * 0.02, row, words, va="center", color=LIGHT["ink"])
            ax.set_title(title, loc="left", fontsize=LETTERS, color=LIGHT["ink"])
            ax.set_yticks([0, 1], ["patch off", "on"], fontsize=LETTERS)
            ax.tick_params(length=0)
            ax.set_xticks([])
            ax.set_xlim(0, longest * ROOM)
            ax.invert_yaxis()
        return svg_of(drawn)


@click.command(help=__doc__)
@click.argument("picture", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, required=True)
def main(picture: Path, files: tuple[str, ...]) -> None:
    titles, paths = zip(*(file.rsplit("=", 1) for file in files), strict=True)
    picture.write_bytes(draw(list(titles), [json.loads(Path(path).read_text()) for path in paths]))


if __name__ == "__main__":
    main()
