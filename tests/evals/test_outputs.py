"""How results are shown and kept: numbers as people read them, `-o`, `--json` and `--csv` of every command."""

import csv
import io
import os
import subprocess
import sys
from unittest.mock import Mock

import click
import pytest
from flash_evals import models, output
from flash_evals.errors import EvalError
from flash_evals.output import FORMATS, Outputs
from flash_evals.page import units
from flash_evals.page.description import Description, Table
from rich.console import Console

RESULT = {"command": "test", "figure": 1.5, "none": float("nan")}
ROWS = [{"trial": 0, "seconds": 0.25}, {"trial": 1, "seconds": float("inf")}]
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
    "| 1 | off | 1 |\n\none  \ntwo!  \n" + INTERRUPTED + "\n",  # of one paragraph three lines
    "json": '{\n  "command": "test",\n  "figure": 1.5,\n  "none": null\n}\n',
    "jsonl": '{"trial": 0, "seconds": 0.25}\n{"trial": 1, "seconds": null}\n',
    "csv": "trial,seconds\n0,0.25\n1,inf\n",
}


@pytest.mark.parametrize("output_format", FORMATS)
def test_what_stdout_gets(capsys, tmp_path, output_format):
    """And files theirs, whatever stdout gets."""
    json_file, csv_file, drawn = tmp_path / "out.json", tmp_path / "out.csv", []
    Outputs(output_format, json_file, csv_file).deliver(FOUND, ROWS, lambda: drawn.append(True))
    assert capsys.readouterr().out == FORMATTED[output_format]
    assert (json_file.read_text(), csv_file.read_text()) == (FORMATTED["json"], FORMATTED["csv"])
    assert drawn == [True]


def test_files_are_written_before_stdout_fails(tmp_path, monkeypatch):
    """As a pipe that is closed, or a full disk behind `>`."""
    monkeypatch.setattr(click, "echo", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        Outputs(json_file=tmp_path / "out.json").deliver(FOUND, ROWS)
    assert (tmp_path / "out.json").read_text() == FORMATTED["json"]


IN_ASCII = """
import sys
from pathlib import Path
from flash_evals.output import Outputs
from flash_evals.page.description import Description
Outputs(json_file=Path(sys.argv[1])).deliver(Description("\\xb5", ["a page"], []), [])
"""


def test_files_are_utf_8_whatever_the_locale(tmp_path):
    out, locale = tmp_path / "out.json", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", IN_ASCII, out], env={**os.environ, **locale}, check=True)
    assert out.read_text(encoding="utf-8") == '"µ"\n'


def test_a_file_that_cannot_be_written_costs_no_other_its_copy(tmp_path, capsys):
    """A folder may be gone by the time there are results."""
    csv_file, drawn = tmp_path / "out.csv", []
    outputs = Outputs(json_file=tmp_path / "gone" / "out.json", csv_file=csv_file)
    with pytest.raises(EvalError, match=r"cannot write .*out\.json: No such file"):
        outputs.deliver(FOUND, ROWS, lambda: drawn.append(True))
    assert (csv_file.read_text(), drawn) == (FORMATTED["csv"], [True])
    assert capsys.readouterr().out == FORMATTED["text"]


SMALL = {
    "perplexity": ("--max-windows", 3, "--batch-size", 1),
    "speed": ("-p", 4, "-g", 2, "-d", 0, "-r", 2),
    "finetune": ("-p", "8,4", "-r", 2),
}


@pytest.mark.parametrize("command", SMALL)
def test_a_row_for_each_trial_of_each_arm(run_command, tmp_path, command):
    """In the order they ran, with the figures of the result file; stdout is what the file has."""
    csv_file = tmp_path / "out.csv"
    result = run_command(command, *SMALL[command], "--csv", csv_file, "-o", "csv")
    assert result["page"] == csv_file.read_text()
    rows = list(csv.DictReader(io.StringIO(result["page"])))
    expected = [
        {**test, **trial, "arm": arm, "repetition": number, "batch": number, **trial[arm]}
        for test in result.get("results", [result])
        for number, trial in enumerate(test["trials"])
        for arm in trial["order"]
    ]
    assert [row["arm"] for row in rows][:4] == ["off", "on", "on", "off"]
    assert len(rows) == len(expected)
    known = set(rows[0]) & set(expected[0])
    assert known >= {"arm", "seconds", "tokens_per_s", "peak_memory_mb"}
    for row, trial in zip(rows, expected, strict=True):
        assert {key: row[key] for key in known} == {key: "" if trial[key] is None else str(trial[key]) for key in known}


@pytest.mark.parametrize(
    ("shown", "values", "text"),
    [
        (models._count, [12], "12"),
        (models._count, [1_300], "1.3 k"),
        (models._count, [1_017_984], "1.0 M"),
        (models._count, [494_032_768], "494 M"),
        (models._count, [7_615_616_512], "7.6 B"),
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


def test_eta_speed_and_memory_on_a_terminal(run_command, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "Console", lambda stderr: Console(file=terminal, force_terminal=stderr, width=150))
    page = run_command("perplexity", "--stride", 2)["page"]
    shown = terminal.getvalue()
    for part in ("windows, off and on", "0:00:0", "tokens/s · peak ", " MB"):  # 0:00:0 is the time that is left
        assert part in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared
    assert "tokens/s · peak" not in page
