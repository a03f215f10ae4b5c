"""Ctrl-C keeps what was measured, says so, and ends with exit code 130."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from flash_evals import generation, measure, paired, training

Invoke = Callable[..., click.testing.Result]


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sends this process a SIGINT in the middle of the trial of that number; warm-up trials count."""

    def arrange(number: int) -> None:
        trials = []

        def run(*arguments: Any) -> Any:
            trials.append(arguments)
            if len(trials) == number:
                signal.raise_signal(signal.SIGINT)
            return measure.run(*arguments)

        monkeypatch.setattr(paired, "run", run)
        monkeypatch.setattr(generation, "run", run)
        monkeypatch.setattr(training, "run", run)

    return arrange


@pytest.fixture
def perplexity(model_folder: Path, text_file: Path) -> list[object]:
    return ["perplexity", "--model", model_folder, "--dataset", text_file, "--context", 24, "--batch-size", 2]


@pytest.mark.parametrize("arm", [0, 1])
def test_perplexity(
    invoke: Invoke, interrupt_at: Callable[[int], None], perplexity: list[object], tmp_path: Path, arm: int
) -> None:
    """In either arm of the third batch: the figures are those of the first two batches, and nothing of the third."""
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    assert invoke(*perplexity, "--max-windows", 4, "--json", whole).exit_code == 0
    interrupt_at(2 + 2 * 2 + 1 + arm)  # warm-up, two batches
    page = invoke(*perplexity, "--json", cut, "--csv", tmp_path / "cut.csv")
    assert (page.exit_code, page.stderr) == (130, "")
    expected, kept = json.loads(whole.read_text()), json.loads(cut.read_text())
    assert kept["interrupted"] is True
    assert kept["windows"]["finished"] == 4 < kept["windows"]["planned"]
    for figure in ("tokens", "words", "bytes", "paired", "flash"):
        assert kept[figure] == expected[figure]
    assert kept["off"]["ppl"] == expected["off"]["ppl"]
    planned = kept["windows"]["planned"]
    assert page.stdout.endswith(f"Interrupted after 4 of {planned} windows; the figures are of those.\n")
    assert len((tmp_path / "cut.csv").read_text().splitlines()) == 1 + 4


def test_perplexity_that_fails_in_the_middle(
    invoke: Invoke, perplexity: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the memory ends: what was measured is shown and written, and the error is not hidden."""
    trials: list[Any] = []

    def run(*arguments: Any) -> Any:
        trials.append(arguments)
        if len(trials) == 2 + 2 * 2 + 1:
            raise MemoryError("no more")
        return measure.run(*arguments)

    monkeypatch.setattr(paired, "run", run)
    out = tmp_path / "out.json"
    page = invoke(*perplexity, "--json", out)
    assert isinstance(page.exception, MemoryError)
    assert page.exit_code == 1
    kept = json.loads(out.read_text())
    assert kept["interrupted"] is True
    assert kept["windows"]["finished"] == 4
    assert page.stdout.endswith("windows; the figures are of those.\n")


def test_perplexity_before_anything_is_measured(
    invoke: Invoke, interrupt_at: Callable[[int], None], perplexity: list[object]
) -> None:
    interrupt_at(1)
    page = invoke(*perplexity)
    assert (page.exit_code, page.stdout) == (130, "")
    assert page.stderr == "Interrupted: nothing was measured.\n"


def test_speed(invoke: Invoke, interrupt_at: Callable[[int], None], model_folder: Path, tmp_path: Path) -> None:
    """In the third test, after its warm-up: the first two tests are whole, and the third is not there."""
    out = tmp_path / "out.json"
    interrupt_at(2 * (2 + 2) + 2 + 1)
    page = invoke("speed", "--model", model_folder, "-p", "8,16,32", "-g", 0, "-d", 0, "-r", 1, "--json", out)
    assert page.exit_code == 130
    kept = json.loads(out.read_text())
    assert kept["interrupted"] is True
    assert [test["test"] for test in kept["results"]] == ["pp8", "pp16"]
    assert page.stdout.endswith("Interrupted; the figures are of the trials that were finished.\n")


def test_speed_before_anything_is_measured(
    invoke: Invoke, interrupt_at: Callable[[int], None], model_folder: Path
) -> None:
    interrupt_at(3)
    page = invoke("speed", "--model", model_folder, "-p", 8, "-g", 0, "-d", 0)
    assert (page.exit_code, page.stdout) == (130, "")
    assert page.stderr == "Interrupted: nothing was measured.\n"


def test_finetune(invoke: Invoke, interrupt_at: Callable[[int], None], model_folder: Path, tmp_path: Path) -> None:
    """In the second repetition of the second length: the first length is whole, of the second one step is there."""
    out = tmp_path / "out.json"
    interrupt_at(2 * (1 + 2) + 2 * (1 + 1) + 2)
    page = invoke("finetune", "--model", model_folder, "-p", "8,16,32", "-r", 2, "--json", out)
    assert page.exit_code == 130
    kept = json.loads(out.read_text())
    assert kept["interrupted"] is True
    assert [(length["seq_len"], len(length["trials"])) for length in kept["results"]] == [(8, 2), (16, 1)]
    assert page.stdout.endswith("Interrupted; the figures are of the steps that were finished.\n")


def test_finetune_before_anything_is_measured(
    invoke: Invoke, interrupt_at: Callable[[int], None], model_folder: Path
) -> None:
    interrupt_at(2)
    page = invoke("finetune", "--model", model_folder, "-p", 8, "--grad-checkpoint")
    assert (page.exit_code, page.stdout) == (130, "")
    assert page.stderr == "Interrupted: nothing was measured.\n"
