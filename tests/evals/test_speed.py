"""Tests which cases `flash-eval speed` measures, which tokens a trial reads, and the page and the result file."""

import dataclasses
import statistics
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from flash_evals.results.arms import ARMS, Measurement
from flash_evals.results.speed_result import Case, Settings
from flash_evals.work import generation, models
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache
from msgspec.structs import replace


@pytest.mark.slow("14 seconds")
def test_every_length_and_batch_at_every_depth(run_command):
    """A speed counts the tokens of all sequences in the batch. Flash attention takes all calls."""
    result = run_command("speed", "-p", "16,32", "-g", 4, "-d", "0,64", "-b", "1,3", "-r", 2)
    tests = ["pp16", "pp32", "tg4", "pp16 x3", "pp32 x3", "tg4 x3"]
    names = [*tests, *(f"{test} @ d64" for test in tests)]
    assert [test["test"] for test in result["results"]] == names
    for test in result["results"]:
        assert test["batch_size"] == (3 if "x3" in test["test"] else 1)
        assert [trial["order"] for trial in test["trials"]] == [["off", "on"], ["on", "off"]]
        for arm in ARMS:
            trials = [trial[arm] for trial in test["trials"]]
            speeds = [trial["tokens_per_s"] for trial in trials]
            assert test[arm]["tokens_per_s"] == pytest.approx(statistics.mean(speeds))
            assert test[arm]["tokens_per_s_sd"] == pytest.approx(statistics.stdev(speeds))
            assert speeds[0] == pytest.approx(test["batch_size"] * test["tokens"] / trials[0]["seconds"])
            assert test[arm]["peak_memory_mb"] == max(trial["peak_memory_mb"] for trial in trials)
            assert 0 < test[arm]["attention_share"] < 1
    assert result["settings"]["batch_size"] == [1, 3]
    assert result["flash"]["fallbacks"] == {}
    assert set(result["flash"]["calls"]) == {"cpu_prefill", "cpu_decode"}


@pytest.mark.slow("3 seconds")
def test_the_seed_reaches_the_work(run_command, monkeypatch):
    """--seed takes effect. -g 0 measures no generation. One repetition has no standard deviation."""
    prompts = []
    monkeypatch.setattr(generation, "generate_step", lambda prompt, *_, **__: prompts.append(prompt.tolist()) or ())
    for seed in (0, 0, 1):
        result = run_command("speed", "-p", 20, "-g", 0, "-d", 0, "-r", 1, "--seed", seed)
    [test] = result["results"]
    assert (test["test"], test["off"]["tokens_per_s_sd"], result["draft_model"]) == ("pp20", None, None)
    assert "accepted" not in result["page"]
    first, other = prompts[0], prompts[-1]
    assert prompts == [first] * 12 + [other] * 6  # 2 arms; warm-up, attention's share, repetition
    assert first != other
    assert all(0 <= token < 320 for token in first + other)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "tokens", "depth", "reads"),
    [
        # mlx-lm processes all tokens of a prompt but the last, then takes a step with the last one.
        ("prompt", 16, 0, [(15, 0), (1, 15)]),
        ("prompt", 1, 0, [(1, 0)]),
        ("prompt", 16, 8, [(15, 8), (1, 23)]),
        ("generation", 3, 0, [(1, 0), (1, 1), (1, 2)]),
        ("generation", 1, 8, [(1, 8)]),
    ],
)
def test_what_a_trial_reads(loaded, monkeypatch, kind, tokens, depth, reads, batch_size):
    """All trials of both arms read the same tokens. `reads` lists (new tokens, cached tokens) for each call."""
    trials, read, model = [], [], loaded.model

    def spy(inputs, cache):
        trials[-1].append((*inputs.shape, cache[0].size()))
        read[-1].extend(inputs.T.tolist())
        return model(inputs, cache=cache)

    def run(arm, work, tokens, flash, precision):
        trials.append([])
        read.append([])
        return work(), Measurement(1.0, tokens, 1.0)

    spy.layers = model.layers
    monkeypatch.setattr(generation, "run", run)
    monkeypatch.setattr(generation, "attention_share", lambda name, work, precision: None)
    settings = Settings([], [], [], [], None, repetitions=2, seed=0, prefill_step_size=0, memory="")
    case, watched = Case(kind, tokens, depth, batch_size), dataclasses.replace(loaded, model=spy)
    *_, (test, _) = generation.tests([watched], [case], settings)
    assert [trial.on.tokens_per_s for trial in test.trials] == [tokens * batch_size] * 2
    if depth:
        assert sum(size for _, size, _ in trials.pop(0)) == depth  # the first call fills the cache
        read.pop(0)
    assert trials == [[(batch_size, *each) for each in reads]] * 6  # a warm-up and two repetitions, each with two arms
    assert read == [read[0]] * 6
    if batch_size > 1 and kind == "prompt" and tokens > 1:
        first, *others = zip(*read[0], strict=True)
        assert all(sequence != first for sequence in others)


@pytest.mark.slow("6 seconds")
@pytest.mark.parametrize(("more", "ahead", "guesses"), [((), 3, 9), (("--num-draft-tokens", 5), 5, 10)])
def test_a_model_that_drafts_for_itself_is_always_right(run_command, model_folder, more, ahead, guesses):
    result = run_command("speed", "-p", 8, "-g", 12, "-d", "0,16", "-r", 1, "--draft-model", model_folder, *more)
    for test in result["results"]:
        expected = (0, 0, None) if test["kind"] == "prompt" else (guesses, guesses, 1)
        for arm in ARMS:
            trial = test["trials"][0][arm]
            assert (trial["drafted"], trial["accepted"], test[arm]["accepted_share"]) == expected
    assert result["draft_model"]["name"] == model_folder.name
    assert result["settings"]["num_draft_tokens"] == ahead
    header, _, titles, *lines = result["page"].splitlines()
    assert f" · {ahead} tokens at a time drafted by {model_folder.name}, " in header
    assert titles.endswith("accepted off   on")
    assert [line.split()[-2:] for line in lines[:4]] == [["–", "–"], ["100%", "100%"]] * 2


def test_models_that_cannot_draft_for_each_other_are_refused(refused, loaded, monkeypatch):
    other = dataclasses.replace(loaded, tokenizer=SimpleNamespace(vocab_size=9))
    caches = SimpleNamespace(make_cache=lambda: [KVCache(), ArraysCache.__new__(ArraysCache)])
    snake = dataclasses.replace(loaded, model=caches, described=replace(loaded.described, name="Snake"))
    for pair, said in (
        (
            (loaded, other),
            f"{loaded.name} has a tokenizer of 9 tokens, expected the tokenizer of {loaded.name}, with 3",
        ),
        ((loaded, snake), ": mlx-lm cannot remove rejected tokens from the cache of Snake"),
        ((snake, loaded), ": mlx-lm cannot remove rejected tokens from the cache of Snake"),
    ):
        monkeypatch.setattr(models, "load", Mock(side_effect=pair))
        assert said in refused("speed", "-g", 4, "-d", 0, "--draft-model", "a", "-p", 8)


def test_a_cache_that_mlx_lm_cannot_batch_is_refused_before_anything_runs(refused, loaded, monkeypatch):
    alone = SimpleNamespace(make_cache=lambda: [ConcatenateKVCache()])
    monkeypatch.setattr(models, "load", lambda *_: dataclasses.replace(loaded, model=alone))
    line = refused("speed", "-g", 0, "-d", 0, "-p", 8, "-b", "1,2")
    assert line == f"Error: -b: mlx-lm cannot batch the cache of {loaded.name}, a ConcatenateKVCache"
