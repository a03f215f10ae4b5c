"""`flash-eval speed`: the tests it makes of its options, what it times, and what it writes."""

import csv
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import mlx.core as mx
import pytest
from flash_evals import machine, speed
from flash_evals.models import LoadedModel
from flash_evals.speed import Case

Invoke = Callable[..., click.testing.Result]


@pytest.fixture
def evaluate(invoke: Invoke, model_folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*arguments: object) -> dict[str, Any]:
        out = tmp_path / "out.json"
        result = invoke("speed", "--model", model_folder, "--json", out, *arguments)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return {**json.loads(out.read_text()), "page": result.stdout}

    return run


def test_every_length_at_every_depth(evaluate: Callable[..., dict[str, Any]]) -> None:
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


def test_none_of_one_kind(evaluate: Callable[..., dict[str, Any]]) -> None:
    result = evaluate("-p", 0, "-g", 3, "-d", 0, "-r", 1)
    assert [test["test"] for test in result["results"]] == ["tg3"]
    assert result["results"][0]["off"]["tokens_per_s_sd"] is None
    assert set(result["flash"]["calls"]) == {"cpu_decode"}


@pytest.mark.parametrize(
    ("test", "reads"),
    [
        # mlx-lm processes all but the last token of a prompt, then takes a step with that one.
        (Case("prompt", 16, 0), [(15, 0), (1, 15)]),
        (Case("prompt", 1, 0), [(1, 0)]),
        (Case("prompt", 16, 8), [(15, 8), (1, 23)]),
        (Case("generation", 3, 0), [(1, 0), (1, 1), (1, 2)]),
        (Case("generation", 2, 8), [(1, 8), (1, 9)]),
        (Case("generation", 1, 8), [(1, 8)]),
    ],
)
def test_what_a_trial_reads(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, test: Case, reads: list[tuple[int, int]]
) -> None:
    """So many tokens at such a depth, and in each trial of both arms the same ones."""
    trials: list[list[tuple[int, int]]] = []
    tokens: list[list[int]] = []
    model = loaded.model

    def spy(inputs: mx.array, cache: Any) -> mx.array:
        trials[-1].append((inputs.size, cache[0].offset))
        tokens[-1].extend(inputs.flatten().tolist())
        return model(inputs, cache=cache)

    def run(arm: str, work: Callable[[], None], flash: object) -> Any:
        trials.append([])
        tokens.append([])
        work()
        return None, None

    spy.layers = model.layers
    watched = LoadedModel(spy, loaded.tokenizer, loaded.config, "", "", None)
    monkeypatch.setattr(speed, "run", run)
    pairs = list(speed.measured(watched, [test], repetitions=2, seed=0))
    assert [pair.test for pair in pairs] == [test, test]
    if test.depth:
        assert sum(size for size, _ in trials.pop(0)) == test.depth  # the cache is filled once
        tokens.pop(0)
    assert trials == [reads] * 6  # warm-up and two repetitions, two arms
    assert tokens == [tokens[0]] * 6


def test_the_seed_decides_the_tokens(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt(seed: int) -> list[int]:
        seen: list[list[int]] = []
        monkeypatch.setattr(speed, "_generate", lambda loaded, tokens, steps, cache: seen.append(tokens.tolist()))
        assert list(speed.measured(loaded, [Case("prompt", 20, 0)], 1, seed))
        assert all(tokens == seen[0] for tokens in seen)
        return seen[0]

    assert prompt(0) == prompt(0) != prompt(1)
    assert all(0 <= token < loaded.vocabulary for token in prompt(2))


def test_a_trial_does_not_change_the_cache_of_the_next(loaded: LoadedModel) -> None:
    import numpy as np

    cache = speed._cache(loaded, np.arange(10))
    before = [np.array(array) for layer in cache for array in layer.state[:2]]
    speed._generate(loaded, np.arange(5), 3, speed._copy(cache))
    after = [np.array(array) for layer in cache for array in layer.state[:2]]
    assert cache[0].offset == 10
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_trial_has_buffers_of_its_own(loaded: LoadedModel) -> None:
    # Else the first append copies the whole cache while the clock runs, and counts it as memory of the trial.
    import numpy as np

    cache = speed._cache(loaded, np.arange(10))
    held = sum(array.nbytes for layer in cache for array in (layer.keys, layer.values))
    mx.synchronize()
    before = mx.get_active_memory()
    copied = speed._copy(cache)
    assert mx.get_active_memory() - before >= held
    assert all(
        mx.array_equal(a, b) for x, y in zip(cache, copied, strict=True) for a, b in zip(x.state, y.state, strict=True)
    )


def test_a_negative_seed_is_refused(invoke: Invoke, model_folder: Path) -> None:
    result = invoke("speed", "--model", model_folder, "--seed", -1)
    assert (result.exit_code, result.stderr) == (2, "Error: --seed must be at least 0, not -1\n")


def test_csv_has_a_row_for_each_trial_of_each_arm(evaluate: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
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
    evaluate: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
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
        (["-r", "0"], "-r must be at least 1, not 0"),
        (["-p", "100", "-d", "0,29"], "pp100 @ d29 needs 129 positions"),
        (["-p", "0", "-g", "129", "-d", "0"], "tg129 needs 129 positions"),
    ],
)
def test_refused(refused: Callable[..., str], model_folder: Path, arguments: list[str], says: str) -> None:
    assert says in refused("speed", "--model", model_folder, *arguments)
