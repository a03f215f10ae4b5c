"""The promises of the project. A promise is a marker of the one test that holds it: `@promise("…")`.

`uv run python -m tests.promises` writes the lists of docs/dev/reliability.md from the markers. `make lint` says when
the page is out of date.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/dev/reliability.md"
BEGIN, END = "<!-- promises: written by tests/promises.py -->\n", "<!-- end of promises -->\n"
FOLDERS = {
    "core": "The op",
    "patch": "The patch",
    "evals": "Evaluation",
    "cuda": "CUDA",
    "metal": "Metal",
    "macos": "macOS",
    "packaging": "Packaging",
    "programs": "Other programs",
    "docs": "Pages",
}


def promise(text: str) -> pytest.MarkDecorator:
    """Marks the test that fails if this promise is broken."""
    return pytest.mark.promise(text)


def marked(file: Path) -> Iterator[tuple[str, str]]:
    """Yields (promise, test) for each marker in the file. A test of a class is CLASS::TEST."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = {"": tree} | {f"{node.name}::": node for node in tree.body if isinstance(node, ast.ClassDef)}
    for prefix, inside in classes.items():
        for test in (node for node in inside.body if isinstance(node, ast.FunctionDef)):
            for mark in test.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "promise":
                    yield ast.literal_eval(mark.args[0]), f"{prefix}{test.name}"


def promises() -> dict[str, str]:
    """Maps each promise to its test. Raises a ValueError if two tests hold the same promise."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for file in sorted((TESTS / folder).glob("test_*.py")):
            for text, test in marked(file):
                place = f"{folder}/{file.name}::{test}"
                if text in found:
                    raise ValueError(f"{found[text]} and {place} hold the same promise: {text}")
                found[text] = place
    return found


def lists() -> str:
    lines = []
    for folder, title in FOLDERS.items():
        lines += [f"### {title}", ""]
        lines += [f"- {text}:\n  `{test}`" for text, test in promises().items() if test.startswith(f"{folder}/")]
        lines.append("")
    return "\n".join(lines)


def with_lists(text: str) -> str:
    """The page's text, with its lists replaced by the current ones."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{lists()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
