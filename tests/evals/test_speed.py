"""`flash-eval speed`: the tests it makes of its options, what it writes, and what it refuses."""

import csv
import re
import statistics
from functools import partial

import pytest
from flash_evals import generation, speed
from flash_evals.errors import EvalError
from flash_evals.generation import Case, Guesses
from flash_evals.models import LoadedModel
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache


@pytest.fixture
def evaluate(run_command):
    return partial(run_command, "speed")


def test_every_length_and_batch_at_every_depth(evaluate):
    """The tokens of sequences at once are counted together; flash takes all of them."""
    result = evaluate("-p", "16,32", "-g", 4, "-d", "0,64", "-b", "1,3", "-r", 2)
    tests = ["pp16", "pp32", "tg4", "pp16 x3", "pp32 x3", "tg4 x3"]
    names = [*tests, *(f"{test} @ d64" for test in tests)]
    assert [test["test"] for test in result["results"]] == names
    for test in result["results"]:
        assert test["batch_size"] == (3 if "x3" in test["test"] else 1)
        assert [trial["order"] for trial in test["trials"]] == [["off", "on"], ["on", "off"]]
        for arm in ("off", "on"):
            trials = [trial[arm] for trial in test["trials"]]
            speeds = [trial["tokens_per_s"] for trial in trials]
            assert test[arm]["tokens_per_s"] == pytest.approx(statistics.mean(speeds))
            assert test[arm]["tokens_per_s_sd"] == pytest.approx(statistics.stdev(speeds))
            assert speeds[0] == pytest.approx(test["batch_size"] * test["tokens"] / trials[0]["seconds"])
            assert test[arm]["peak_memory_mb"] == max(trial["peak_memory_mb"] for trial in trials)
    lines = result["page"].splitlines()
    assert [line.split("  ")[0] for line in lines[2:15]] == ["test", *names]
    assert result["settings"]["batch_size"] == [1, 3]
    assert result["flash"]["fallbacks"] == {}
    assert set(result["flash"]["calls"]) == {"cpu_prefill", "cpu_decode"}


def test_none_of_one_kind(evaluate):
    result = evaluate("-p", 0, "-g", 3, "-d", 0, "-r", 1)
    assert [test["test"] for test in result["results"]] == ["tg3"]
    assert result["results"][0]["off"]["tokens_per_s_sd"] is None
    assert set(result["flash"]["calls"]) == {"cpu_decode"}
    assert (result["draft_model"], result["settings"]["num_draft_tokens"]) == (None, None)
    assert not re.search("accepted|drafted", result["page"])


def test_attention_has_a_share_of_the_time(evaluate, monkeypatch, tmp_path):
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


def test_the_delay_and_the_seed_reach_the_work(evaluate, monkeypatch):
    prompts, waited = [], []
    monkeypatch.setattr(generation.time, "sleep", waited.append)
    monkeypatch.setattr(generation, "_generate", lambda _, tokens, *__: prompts.append(tokens.tolist()) or Guesses())
    for seed in (0, 0, 1):
        settings = evaluate("-p", 20, "-g", 0, "-d", 0, "-r", 1, "--seed", seed, "--delay", 2.5)["settings"]
        assert (settings["seed"], settings["delay"]) == (seed, 2.5)
    assert waited == [2.5] * 3 * 5  # between warm-up, attention's share and one repetition, by two arms
    first, again, other = prompts[:6], prompts[6:12], prompts[12:]
    assert first == again == [first[0]] * 6
    assert first[0] != other[0]
    assert all(0 <= token < 320 for token in first[0] + other[0])


def with_cache(cache):
    """A model whose only layer has such a cache."""

    class Model:
        def make_cache(self):
            return [cache.__new__(cache)]

    return LoadedModel(Model(), None, {"vocab_size": 9}, "Snake", "", None)


def test_a_cache_that_mlx_lm_cannot_batch_is_refused():
    speed._check_models(with_cache(ConcatenateKVCache), None, [Case("prompt", 8, 0)])
    with pytest.raises(EvalError, match=r"^-b: mlx-lm cannot batch the ConcatenateKVCache of Snake$"):
        speed._check_models(with_cache(ConcatenateKVCache), None, [Case("prompt", 8, 0, 2)])
    speed._check_models(with_cache(ArraysCache), None, [Case("prompt", 8, 0, 2)])
