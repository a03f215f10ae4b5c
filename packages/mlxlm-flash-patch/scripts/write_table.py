"""Writes the table of model types in the package's README from models.toml: `uv run .../write_table.py`."""

from collections import defaultdict
from pathlib import Path

from mlxlm_flash_patch.registry import Entry, model_types

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- model types: written by scripts/write_table.py -->\n", "<!-- end of model types -->\n"


def table() -> str:
    """The model types, together where all is the same of them."""
    rows: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, entry in model_types().items():
        rows[how(entry), tested(entry)].append(f"`{name}`")
    lines = ["| attention | tested with | model types |", "|---|---|---|"]
    lines += [f"| {way} | {caches} | {', '.join(names)} |" for (way, caches), names in sorted(rows.items(), key=order)]
    return "\n".join(lines) + "\n"


def how(entry: Entry) -> str:
    if entry.without:
        return f"not patched: {entry.without}"
    return " and ".join(entry.by) or "through another module"


def tested(entry: Entry) -> str:
    if entry.untested:
        return f"not tested: {entry.untested}"
    return ", ".join(entry.caches)


def order(row: tuple[tuple[str, str], list[str]]) -> tuple[bool, int, str]:
    (way, _), names = row
    return way.startswith("not"), -len(names), names[0]


def with_table(text: str) -> str:
    """A README's text with the table as it is to be."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
