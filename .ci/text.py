"""Checks pages and headers. `make lint` runs it. It prints every fault, and exits with status 1 if there is one.

A fault is a source file that does not begin with a comment or docstring, a link whose file or heading is missing, a
page that docs/README.md does not list, a line of prose over 120 columns, or a page whose generated part is out of date.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 120
COMMENTS = {
    "//": (".cpp", ".h", ".metal", ".cu"),
    "#": (
        *(".pyi", ".sh", ".toml", ".cmake", ".yml", ".yaml", ".supp"),
        *("Makefile", "CMakeLists.txt", ".clang-format", ".gitignore", "/run"),
    ),
    "/*": (".css",),
}
PREAMBLE = re.compile(r"(#!.*\n|# /// script\n(#.*\n)*?# ///\n)*")  # lines for the shell or uv, before the header
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def tracked(*endings: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name.endswith(endings) and (ROOT / name).is_file()]


def has_header(file: Path) -> bool:
    text = PREAMBLE.sub("", file.read_text(encoding="utf-8"), count=1)
    if file.suffix == ".py":
        return bool(ast.get_docstring(ast.parse(text)))
    name = f"/{file.name}"
    return text.startswith(next(mark for mark, endings in COMMENTS.items() if name.endswith(endings)))


def headers() -> Iterator[str]:
    for file in tracked(".py", *(ending for endings in COMMENTS.values() for ending in endings)):
        if not has_header(file):
            yield f"{file.relative_to(ROOT)}: the first line must say what the file is for"


def prose(page: Path) -> str:
    """The page, with its code blocks replaced by empty lines."""
    return FENCED.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))


def links_of(page: Path) -> list[tuple[str, str]]:
    """Returns (file, heading) for each link. One of them may be empty."""
    return re.findall(r"\]\((?!\w+://)([^)#\s]*)#?([^)\s]*)\)", prose(page))


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links() -> Iterator[str]:
    pages = [page for page in tracked(".md") if ".github" not in page.parts]
    for page in pages:
        for file, heading in links_of(page):
            target = (page.parent / file) if file else page
            if not target.exists() or (heading and heading not in headings(target)):
                yield f"{page.relative_to(ROOT)}: no {file}{'#' * bool(heading)}{heading} to link to"
    index = ROOT / "docs/README.md"
    listed = {(index.parent / file).resolve() for file, _ in links_of(index)}
    for page in pages:
        if page not in {*listed, index}:
            yield f"docs/README.md: {page.relative_to(ROOT)} is missing"


def lengths() -> Iterator[str]:
    """Yields a fault for each line of prose that is too long. A table row or a single word may be long."""
    for page in tracked(".md"):
        for number, line in enumerate(prose(page).splitlines(), 1):
            if len(line) > WIDTH and not line.startswith("|") and " " in line.strip():
                yield f"{page.relative_to(ROOT)}:{number}: {len(line)} columns, more than {WIDTH}"


def copies() -> Iterator[str]:
    sys.path[:0] = [str(ROOT)]
    from tests import promises
    from tests.patch import write_model_table

    models = write_model_table.PAGE.read_text(encoding="utf-8")
    if write_model_table.with_table(models) != models:
        yield "docs/models.md: uv run python -m tests.patch.write_model_table"
    reliability = promises.PAGE.read_text(encoding="utf-8")
    if promises.with_lists(reliability) != reliability:
        yield "docs/dev/reliability.md: uv run python -m tests.promises"


def main() -> int:
    wrong = [line for check in (headers, links, lengths, copies) for line in check()]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
