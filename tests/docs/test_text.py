"""`make lint` runs .ci/text.py, which names each fault of a page or header in one line."""

import importlib.util
import subprocess
from pathlib import Path

import measure_cuda_gradients
import measure_cuda_table
import pytest
import write_help

from tests.patch import write_model_table

SCRIPT = Path(__file__).parents[2] / ".ci/text.py"
NVIDIA = "\n".join(
    [
        *(f"| {call} | 1.0 | 50% / 60% | 2.0 |" for call in measure_cuda_table.TABLE),
        "\n| call | backward alone, ms | both, ms |\n|---|---|---|",
        *(f"| {call} | 1.0 | 2.0 |" for call in measure_cuda_gradients.TABLE),
    ]
)
WITHOUT_FAULTS = {
    "a.cpp": "// What the file is for.\n",
    "a.py": '#!/usr/bin/env python\n"""What the file is for."""\n',
    "docs/README.md": "# Pages\n\n[A](a.md#its-title), [GPUs](nvidia.md)\n",
    "docs/a.md": f"# Its title\n\n[Back](README.md), [Web](https://example.org/gone)\n\n```\n{'a ' * 61}\n```\n",
    "docs/nvidia.md": NVIDIA,
}


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """check(file, content): runs the script on a repository that has no other faults, and returns what it prints."""
    spec = importlib.util.spec_from_file_location("text", SCRIPT)
    text = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(text)
    monkeypatch.setattr(text, "ROOT", tmp_path)
    monkeypatch.setattr(text.sys, "path", [*text.sys.path])  # a copy, because the script adds folders

    def check(file="a.py", content=WITHOUT_FAULTS["a.py"]):
        for name, given in {**WITHOUT_FAULTS, file: content}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(given)
        for command in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)
        status, said = text.main(), capsys.readouterr().out
        assert status == bool(said)
        return said

    return check


def test_nothing_is_wrong(check):
    assert check() == ""


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a.py", "x = 1\n", "a.py: the first line must say what the file is for"),
        ("a.cpp", "int x;\n", "a.cpp: the first line must say what the file is for"),
        ("docs/a.md", "# Its title\n[A](gone.md)\n", "docs/a.md: no gone.md to link to"),
        ("docs/a.md", "# Its title\n[A](#gone)\n", "docs/a.md: no #gone to link to"),
        ("docs/a.md", "# Another\n", "docs/README.md: no a.md#its-title to link to"),
        ("docs/b.md", "# B\n", "docs/README.md: docs/b.md is missing"),
        ("docs/a.md", f"# Its title\n{'a ' * 60}b\n", "docs/a.md:2: 121 columns, more than 120"),
        ("docs/nvidia.md", NVIDIA.partition("\n")[2], "docs/nvidia.md: other rows than measure_cuda_table.py measures"),
        ("docs/nvidia.md", f"{NVIDIA}\n| more |", "docs/nvidia.md: other rows than measure_cuda_gradients.py measures"),
    ],
)
def test_each_fault_is_named(check, file, content, says):
    assert check(file, content) == f"{says}\n"


@pytest.mark.parametrize(
    ("script", "page", "make"), [(write_help, "commands", "document"), (write_model_table, "models", "with_table")]
)
def test_a_generated_page_that_is_out_of_date_is_named(check, monkeypatch, script, page, make):
    monkeypatch.setattr(script, make, lambda *_: "what the script would write now")
    assert check().startswith(f"docs/{page}.md: uv run ")
