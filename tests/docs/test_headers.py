"""Each source file says in its first lines what it is for."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What a file's first words stand behind; Python's are in its docstring.
COMMENTS = {
    "//": (".cpp", ".h", ".metal"),
    "#": (
        *(".pyi", ".sh", ".toml", ".cmake", ".yml", ".yaml", ".supp"),
        *("Makefile", "CMakeLists.txt", ".clang-format", ".gitignore", "/run"),
    ),
    "/*": (".css",),
}
PREAMBLE = re.compile(r"(#!.*\n|# /// script\n(#.*\n)*?# ///\n)*")  # what must come first, for the shell or uv


def sources() -> list[str]:
    """Tracked files with code in them."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    endings = (".py", *(ending for group in COMMENTS.values() for ending in group))
    return [name for name in tracked.split("\0") if name.endswith(endings) and (ROOT / name).is_file()]


def header(name: str) -> str:
    """The words of the first comment or docstring."""
    text = PREAMBLE.sub("", (ROOT / name).read_text(encoding="utf-8"), count=1)
    if name.endswith(".py"):
        return ast.get_docstring(ast.parse(text)) or ""
    [mark] = [mark for mark, endings in COMMENTS.items() if name.endswith(endings)]
    return text.removeprefix(mark).partition("\n")[0] if text.startswith(mark) else ""


def test_they_say_what_they_are_for() -> None:
    assert [name for name in sources() if len(header(name).split()) < 3] == []


def test_all_kinds_of_files_are_looked_at() -> None:
    endings = {Path(name).suffix or Path(name).name for name in sources()}
    assert {".py", ".pyi", ".cpp", ".h", ".metal", ".toml", ".cmake", ".css", "Makefile", "run"} <= endings
