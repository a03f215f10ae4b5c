"""`-o` chooses the format of a page, `--json` writes the result to a file, and pages have readable numbers."""

import io
from unittest.mock import Mock

import click
import pytest
from flash_evals.commands import runner
from flash_evals.commands.outputs import FORMATS, Outputs
from flash_evals.pages import units
from flash_evals.pages.description import Description, Table
from flash_evals.results import provenance
from rich.console import Console

from tests.core.programs import python

RESULT = {"command": "test", "figure": 1.5, "none": float("nan")}
TABLE = Table("", ["trial", "arm", "a|b"], [["0", "off", "0.25 s"], ["0", "on", "1"], ["1", "off", "1"]], (1, 1))
FOUND = Description(RESULT, ["head", "more"], [TABLE], ["one", "two!"], only="steps")
INTERRUPTED = "The run was interrupted: the figures are of the steps that were finished."
TEXT = f"""\
head · more

trial   arm   a|b
0       off   0.25 s
        on    1
1       off   1

one
two!
{INTERRUPTED}
"""
FORMATTED = {
    "text": TEXT,
    "md": "head · more\n\n| trial | arm | a\\|b |\n| --- | --- | --- |\n| 0 | off | 0.25 s |\n|  | on | 1 |\n"
    "| 1 | off | 1 |\n\none  \ntwo!  \n" + INTERRUPTED + "\n",  # one paragraph of three lines
    "json": '{\n  "command": "test",\n  "figure": 1.5,\n  "none": null\n}\n',
}


@pytest.mark.parametrize("output_format", FORMATS)
def test_what_stdout_gets(capsys, tmp_path, output_format):
    """stdout gets the format that -o names. The file of --json is JSON in any case."""
    json_file = tmp_path / "out.json"
    Outputs(output_format, json_file).deliver(FOUND)
    assert capsys.readouterr().out == FORMATTED[output_format]
    assert json_file.read_text() == FORMATTED["json"]


def test_files_are_written_before_stdout_fails(tmp_path, monkeypatch):
    """Writing to stdout may fail because a pipe is closed, or because `>` leads to a full disk."""
    monkeypatch.setattr(click, "echo", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        Outputs(json_file=tmp_path / "out.json").deliver(FOUND)
    assert (tmp_path / "out.json").read_text() == FORMATTED["json"]


IN_ASCII = """
from pathlib import Path
from flash_evals.commands.outputs import Outputs
from flash_evals.pages.description import Description
Outputs(json_file=Path({out!r})).deliver(Description("\\xb5", ["a page"], []))
"""


def test_files_are_utf_8_whatever_the_locale(tmp_path):
    out, locale = tmp_path / "out.json", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    python(IN_ASCII.format(out=str(out)), **locale)
    assert out.read_text(encoding="utf-8") == '"µ"\n'


@pytest.mark.parametrize(
    ("shown", "values", "text"),
    [
        (provenance._count, [12], "12"),
        (provenance._count, [1_300], "1.3 k"),
        (provenance._count, [1_017_984], "1.0 M"),
        (provenance._count, [494_032_768], "494 M"),
        (provenance._count, [7_615_616_512], "7.6 B"),
        (units.decimal(4), [5343.3441], "5,343.3441"),
        (units.decimal(4), [3.9e35], "3.90e+35"),
        (units.decimal(2), [0.0004], "0.0004"),
        (units.rate, [1234.5], "1,234"),
        (units.rate, [12.34], "12.3"),
        (units.percent, [0.9999999], "99.999 %"),
        (units.duration, [17.24, 17.0, 17.7], "17.2 s (17.0–17.7)"),
        (units.duration, [0.271, 0.2701, 0.3], "271 ms (270–300)"),
        (units.duration, [0.000021, 0.0000204, 0.0006084], "21.0 µs (20.4–608.4)"),
    ],
)
def test_figures(shown, values, text):
    assert shown(*values) == text


@pytest.mark.slow("8 seconds")
def test_eta_speed_and_memory_on_a_terminal(run_command, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(runner, "Console", lambda stderr: Console(file=terminal, force_terminal=stderr, width=150))
    page = run_command("perplexity", "--stride", 2)["page"]
    shown = terminal.getvalue()
    for part in ("windows, off and on", "0:00:0", "tokens/s · peak ", " MB"):  # "0:00:0" starts the remaining time
        assert part in shown
    assert shown.endswith("\x1b[2K")  # erases the line
    assert "tokens/s · peak" not in page
