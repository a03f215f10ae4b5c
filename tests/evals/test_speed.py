"""`flash-eval speed`: the tests it makes of its options, what it writes, and what it refuses."""

import csv
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from flash_evals import generation, machine, speed
from flash_evals.errors import EvalError
from flash_evals.generation import Case, Guesses
from flash_evals.models import LoadedModel
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache

Invoke = Callable[..., click.testing.Result]
Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluate(invoke: Invoke, model_folder: Path, tmp_path: Path) -> Evaluate:
    def run(*arguments: object) -> dict[str, Any]:
        out = tmp_path / "out.json"
        result = invoke("speed", "--model", model_folder, "--json", out, *arguments)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return {**json.loads(out.read_text()), "page": result.stdout}

    return run


def test_every_length_at_every_depth(evaluate: Evaluate) -> None:
    result = evaluate("-p", "16,32", "-g", "4", "-d", "0,64", "-r", 2)
    names = ["pp16", "pp32", "tg4", "pp16 @ d64", "pp32 @ d64", "tg4 @ d64"]
    assert [test["test"] for test in result["results"]] == names
    for test in result["results"]:
        assert [trial["order"] for trial in test["trials"]] == [["off", "on"], ["on", "off"]]
        for arm in ("off", "on"):
            speeds = [trial[arm]["tokens_per_s"] for trial in test["trials"]]
            assert test[arm]["tokens_per_s"] == pytest.approx(statistics.mean(speeds))
            assert test[arm]["tokens_per_s_sd"] == pytest.approx(statistics.stdev(speeds))
            assert speeds[0] == pytest.approx(test["tokens"] / test["trials"][0][arm]["seconds"])
            assert test[arm]["peak_memory_mb"] == max(trial[arm]["peak_memory_mb"] for trial in test["trials"])
    lines = result["page"].splitlines()
    assert [line.split("  ")[0] for line in lines[2:9]] == ["test", *names]
    assert result["flash"]["fallbacks"] == {}


def test_none_of_one_kind(evaluate: Evaluate) -> None:
    result = evaluate("-p", 0, "-g", 3, "-d", 0, "-r", 1)
    assert [test["test"] for test in result["results"]] == ["tg3"]
    assert result["results"][0]["off"]["tokens_per_s_sd"] is None
    assert set(result["flash"]["calls"]) == {"cpu_decode"}


def test_sequences_at_once(evaluate: Evaluate) -> None:
    """Their tokens are counted together; flash takes all of them."""
    result = evaluate("-p", 16, "-g", 4, "-d", "0,64", "-b", "1,3", "-r", 1)
    names = ["pp16", "tg4", "pp16 x3", "tg4 x3", "pp16 @ d64", "tg4 @ d64", "pp16 x3 @ d64", "tg4 x3 @ d64"]
    assert [test["test"] for test in result["results"]] == names
    for test in result["results"]:
        trial = test["trials"][0]["on"]
        assert test["batch_size"] == (3 if "x3" in test["test"] else 1)
        assert trial["tokens_per_s"] == pytest.approx(test["batch_size"] * test["tokens"] / trial["seconds"])
    assert result["settings"]["batch_size"] == [1, 3]
    assert result["flash"]["fallbacks"] == {}
    assert set(result["flash"]["calls"]) == {"cpu_prefill", "cpu_decode"}


def test_attention_has_a_share_of_the_time(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of each test and arm one, on the page and in both files; and none where none is known."""
    shares = iter((0.75, 0.25, None, 0.5))  # on goes first
    monkeypatch.setattr(generation, "attention_share", lambda name, work: next(shares))
    result = evaluate("-p", 8, "-g", 2, "-d", 0, "-r", 2, "--csv", tmp_path / "out.csv")
    found = [[test[arm]["attention_share"] for arm in ("off", "on")] for test in result["results"]]
    assert found == [[0.25, 0.75], [0.5, None]]
    titles, *rows = [line.split("   ") for line in result["page"].splitlines()[2:5]]
    assert [cell.strip() for cell in titles if cell][-2:] == ["attention off", "on"]
    assert [[cell.strip() for cell in row if cell.strip()][-2:] for row in rows] == [["25%", "75%"], ["50%", "–"]]
    with (tmp_path / "out.csv").open(newline="") as file:
        of_arms = {(row["test"], row["arm"], row["attention_share"]) for row in csv.DictReader(file)}
    assert of_arms == {("pp8", "off", "0.25"), ("pp8", "on", "0.75"), ("tg2", "off", "0.5"), ("tg2", "on", "")}


def test_the_delay_reaches_the_work(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(generation.time, "sleep", waited.append)
    result = evaluate("-p", 4, "-g", 0, "-d", 0, "-r", 1, "--delay", 2.5)
    assert result["settings"]["delay"] == 2.5
    assert waited == [2.5] * 5  # warm-up, attention's share and one repetition, by two arms


def test_a_test_that_fails_keeps_those_before(
    invoke: Invoke, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a GPU has no memory for."""
    generate = generation._generate

    def fails(loaded: LoadedModel, tokens: Any, steps: int, cache: Any) -> Guesses:
        if len(tokens) > 20:
            raise RuntimeError("[metal] Insufficient Memory")
        return generate(loaded, tokens, steps, cache)

    monkeypatch.setattr(generation, "_generate", fails)
    out = tmp_path / "out.json"
    page = invoke("speed", "--model", model_folder, "-p", "16,32", "-g", 0, "-d", 0, "-r", 1, "--json", out)
    line = "Error: pp32 fails with the patch off: [metal] Insufficient Memory\n"
    assert (page.exit_code, page.stderr) == (2, line)
    assert [test["test"] for test in json.loads(out.read_text())["results"]] == ["pp16"]
    assert "pp16" in page.stdout


def with_cache(cache: type) -> LoadedModel:
    """A model whose only layer has such a cache."""

    class Model:
        def make_cache(self) -> list[object]:
            return [cache.__new__(cache)]

    return LoadedModel(Model(), None, {"vocab_size": 9}, "Snake", "", None)


def test_a_cache_that_mlx_lm_cannot_batch_is_refused() -> None:
    speed._check_models(with_cache(ConcatenateKVCache), None, [Case("prompt", 8, 0)])
    with pytest.raises(EvalError, match=r"^-b: mlx-lm cannot batch the ConcatenateKVCache of Snake$"):
        speed._check_models(with_cache(ConcatenateKVCache), None, [Case("prompt", 8, 0, 2)])
    speed._check_models(with_cache(ArraysCache), None, [Case("prompt", 8, 0, 2)])


def test_the_seed_reaches_the_work(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []

    def generate(loaded: LoadedModel, tokens: Any, steps: int, cache: Any) -> Guesses:
        prompts.append(tokens.tolist())
        return Guesses()

    monkeypatch.setattr(generation, "_generate", generate)
    for seed in (0, 0, 1):
        assert evaluate("-p", 20, "-g", 0, "-d", 0, "-r", 1, "--seed", seed)["settings"]["seed"] == seed
    first, again, other = prompts[0], prompts[6], prompts[12]  # warm-up, attention's share, one repetition; two arms
    assert first == again != other


def test_csv_has_a_row_for_each_trial_of_each_arm(evaluate: Evaluate, tmp_path: Path) -> None:
    result = evaluate("-p", 8, "-g", 2, "-d", 0, "-r", 2, "--csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["test"], row["repetition"], row["arm"]) for row in rows] == [
        (test, repetition, arm)
        for test in ("pp8", "tg2")
        for repetition, arms in (("0", ("off", "on")), ("1", ("on", "off")))
        for arm in arms
    ]
    assert float(rows[0]["seconds"]) == result["results"][0]["trials"][0]["off"]["seconds"]


def test_the_footnote_names_the_reference_blas_where_it_runs(
    evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for blas, named in (("reference", True), ("openblas", False), (None, False)):
        monkeypatch.setattr(machine, "blas", lambda blas=blas: blas)
        page = evaluate("-p", 4, "-g", 0, "-d", 0, "-r", 1)["page"]
        assert (machine.REFERENCE_BLAS in page) is named


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "0", "-g", "0"], "nothing to measure"),
        (["-p", "many"], "-p takes numbers of tokens separated by commas, not 'many'"),
        (["-d", "0,-1"], "-d takes numbers of tokens separated by commas, not '0,-1'"),
        (["-g", ""], "-g takes numbers of tokens separated by commas, not ''"),
        (["-b", "0"], "-b takes numbers of sequences separated by commas, not '0'"),
        (["-r", "0"], "-r must be at least 1, not 0"),
        (["--delay", "-1"], "--delay must be between 0 and 3600 seconds, not -1"),
        (["--delay", "nan"], "--delay must be between 0 and 3600 seconds, not nan"),
        (["--delay", "inf"], "--delay must be between 0 and 3600 seconds, not inf"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["-p", "100", "-d", "0,29"], "pp100 @ d29 needs 129 positions"),
        (["-p", "0", "-g", "129", "-d", "0"], "tg129 needs 129 positions"),
    ],
)
def test_refused(refused: Callable[..., str], model_folder: Path, arguments: list[str], says: str) -> None:
    assert says in refused("speed", "--model", model_folder, *arguments)
