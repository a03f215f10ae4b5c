"""Writes the table of docs/models.md from models.toml: `uv run python -m tests.patch.write_model_table`."""

from collections import defaultdict
from pathlib import Path

from tests.patch.model_types import Entry, model_types

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- model types: written by tests/patch/write_model_table.py -->\n", "<!-- end of model types -->\n"


CALLS = {"seam": "mlx-lm's function", "mx.fast": "MLX's function", "hand-written": "written out"}


def table() -> str:
    """The table in Markdown. Model types with the same attention and caches share a row."""
    rows: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, entry in model_types().items():
        rows[how(entry), tested(entry)].append(f"`{name}`")
    lines = ["| attention | tested with | model types |", "|---|---|---|"]
    lines += [f"| {way} | {caches} | {', '.join(names)} |" for (way, caches), names in sorted(rows.items(), key=order)]
    return "\n".join(lines) + "\n"


def how(entry: Entry) -> str:
    if entry.without:
        return f"none: {entry.without}"
    return " and ".join(CALLS[way] for way in entry.by) or "another type's attention"


def tested(entry: Entry) -> str:
    if entry.untested:
        return f"not tested: {entry.untested}"
    return ", ".join(entry.caches)


def order(row: tuple[tuple[str, str], list[str]]) -> tuple[bool, int, str]:
    (way, _), names = row
    return way.startswith("none"), -len(names), names[0]


def with_table(text: str) -> str:
    """The page's text, with its table replaced by the current one."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
