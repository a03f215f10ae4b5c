"""`-o md`, read by a Markdown parser: one table with the cells of the page, and lines that stay lines."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import click.testing
import pytest
from flash_evals import machine
from flash_evals.output import Outputs, Table
from markdown_it import MarkdownIt
from markdown_it.token import Token

Invoke = Callable[..., click.testing.Result]

RUNS = {
    "speed": ("-p", 8, "-g", 2, "-d", 0, "-r", 1),
    "finetune": ("-p", "8,16", "-r", 1, "--batch-size", 16, "--max-memory", 0.0003),
    "kernels": ("--shape", "2/1x8", "--seq-len", "16,32", "-r", 1, "--impl", "flash,mlx,naive"),
}


def parsed(page: str) -> tuple[list[list[list[str]]], list[list[str]]]:
    """Tables as rows of cells, and paragraphs as lines."""
    tables: list[list[list[str]]] = []
    paragraphs: list[list[str]] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    for before, token in pairwise(tokens):
        match before.type:
            case "table_open":
                tables.append([])
            case "tr_open":
                tables[-1].append([])
            case "th_open" | "td_open":
                tables[-1][-1].append(token.content)
            case "paragraph_open":
                kinds = [child.type for child in token.children or ()]
                assert "softbreak" not in kinds
                paragraphs.append(["".join(part) for part in lines_of(token.children or [])])
    return tables, paragraphs


def lines_of(children: list[Token]) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    for child in children:
        if child.type == "hardbreak":
            lines.append([])
        else:
            assert child.type == "text", f"{child.type}: {child.content}"
            lines[-1].append(child.content)
    return lines


@pytest.mark.parametrize("command", RUNS)
def test_a_page(
    invoke: Invoke, model_folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "blas", lambda: "reference")
    out = tmp_path / "out.json"
    arguments = RUNS[command] if command == "kernels" else ("--model", model_folder, *RUNS[command])
    done = invoke(command, *arguments, "-o", "md", "--json", out)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    [[titles, *rows]], [header, closing] = parsed(done.stdout)
    assert len(header) == 1
    assert all(len(row) == len(titles) for row in rows)
    result = json.loads(out.read_text())
    match command:
        case "speed":
            assert [row[0] for row in rows] == ["pp8", "tg2"]
            assert [line.partition(" ")[0] for line in closing] == ["flash:", "The", "attention"]
        case "finetune":
            assert [row[:2] for row in rows] == [["8", "off"], ["", "on"], ["", "on/off"]]
            assert rows[-1][5].startswith("max |Δ| ")
            assert closing[-1] == f"Skipped {result['skipped'][0]['reason']}."
        case "kernels":
            assert [row[4] for row in rows] == ["flash", "mlx", "naive"] * 2
            assert [line.partition(":")[0] for line in closing] == ["flash against mlx", "flash against naive"]


def test_lines_after_each_other_and_apart(capsys: pytest.CaptureFixture[str]) -> None:
    def page(table: Table) -> str:
        return "\n".join(["head", "", table([("a", "b"), ("1|2", "3")]), "", "one", "two", "three", "", "four"])

    Outputs("md").deliver({}, [], page)
    tables, paragraphs = parsed(capsys.readouterr().out)
    assert tables == [[["a", "b"], ["1|2", "3"]]]
    assert paragraphs == [["head"], ["one", "two", "three"], ["four"]]
    Outputs("text").deliver({}, [], page)
    assert "one\ntwo\nthree\n\nfour" in capsys.readouterr().out
