"""Formatters, linters and the type checker agree with every file."""

import subprocess
import sys
from pathlib import Path

import pytest
from demanded import lacking

ROOT = Path(__file__).parents[1]


def cpp_files() -> list[str]:
    return [
        str(path)
        for pattern in ("*.h", "*.cpp", "*.metal")
        for folder in ("packages/*/csrc", "tests")
        for path in ROOT.glob(f"{folder}/**/{pattern}")
    ]


COMMANDS = {
    "ruff check": ["ruff", "check", "--no-cache", "."],
    "ruff format": ["ruff", "format", "--no-cache", "--check", "."],
    "mypy": ["mypy"],
    "clang-format": ["clang-format", "--dry-run", "-Werror", *cpp_files()],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_agrees(name):
    program, *arguments = COMMANDS[name]
    path = Path(sys.executable).parent / program
    if not path.exists():
        lacking(f"no {program}: uv sync --all-groups")
    done = subprocess.run([path, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
