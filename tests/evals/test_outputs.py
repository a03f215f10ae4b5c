"""`-o`: what stdout gets, of every command that measures. The same figures in each format, and in the files."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from flash_evals.output import FORMATS, Outputs, columns, markdown

Invoke = Callable[..., click.testing.Result]

RESULT = {"command": "test", "figure": 1.5, "none": float("nan")}
ROWS = [{"trial": 0, "seconds": 0.25}, {"trial": 1, "seconds": float("inf")}]


def page(table: Any) -> str:
    return "head\n\n" + table([("trial", "a|b"), ("0", "0.25")])


def shown(capsys: pytest.CaptureFixture[str], output_format: str) -> str:
    Outputs(output_format).deliver(RESULT, ROWS, page)
    return capsys.readouterr().out


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "text") == "head\n\ntrial   a|b\n0       0.25\n"


def test_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "md") == "head\n\n| trial | a\\|b |\n| --- | --- |\n| 0 | 0.25 |\n"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(shown(capsys, "json")) == {"command": "test", "figure": 1.5, "none": None}


def test_jsonl(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == [{"trial": 0, "seconds": 0.25}, {"trial": 1, "seconds": None}]


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "csv") == "trial,seconds\n0,0.25\n1,inf\n"


def test_files_get_theirs_whatever_stdout_gets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    json_file, csv_file = tmp_path / "out.json", tmp_path / "out.csv"
    drawn: list[bool] = []
    Outputs("md", json_file, csv_file).deliver(RESULT, ROWS, page, lambda: drawn.append(True))
    capsys.readouterr()
    assert json_file.read_text() == shown(capsys, "json")
    assert csv_file.read_text() == shown(capsys, "csv")
    assert drawn == [True]


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_command(invoke: Invoke, output_format: str, tmp_path: Path) -> None:
    """`kernels` stands for all: they share the option."""
    out = tmp_path / "out.json"
    done = invoke("kernels", "--seq-len", 32, "-r", 1, "--impl", "flash", "-o", output_format, "--json", out)
    assert (done.exit_code, done.stderr) == (0, "")
    [entry] = json.loads(out.read_text())
    seconds = entry["forward"]["time(s)"]
    match output_format:
        case "json":
            assert json.loads(done.stdout) == [entry]
        case "jsonl":
            assert json.loads(done.stdout)["time(s)"] == seconds
        case "csv":
            assert float(next(csv.DictReader(io.StringIO(done.stdout)))["time(s)"]) == seconds
        case "md":
            assert done.stdout.splitlines()[2].startswith("| shape | dtype | queries |")
        case "text":
            assert done.stdout.splitlines()[2].startswith("shape     dtype     queries")


SMALL = {
    "perplexity": ("--context", 32, "--max-windows", 1),
    "speed": ("-p", 4, "-g", 0, "-d", 0, "-r", 1),
    "finetune": ("-p", 8, "-r", 1),
}


@pytest.mark.parametrize("command", SMALL)
@pytest.mark.parametrize("output_format", ["json", "csv"])
def test_the_others_too(
    invoke: Invoke, model_folder: Path, text_file: Path, command: str, output_format: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    text = ("--dataset", text_file) if command == "perplexity" else ()
    done = invoke(
        command, "--model", model_folder, *text, *SMALL[command], "-o", output_format, f"--{output_format}", out
    )
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == out.read_text()


def test_tables_are_aligned() -> None:
    assert columns([("", "off"), ("speed", "1")]) == "        off\nspeed   1"
    assert markdown([("", "off")]) == "|  | off |\n| --- | --- |"
