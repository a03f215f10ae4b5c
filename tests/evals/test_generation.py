"""The work of `flash-eval speed`: what a trial reads, on which cache, and what happens between two of them."""

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import generation
from flash_evals.errors import EvalError
from flash_evals.generation import Case, Guesses
from flash_evals.models import LoadedModel


@pytest.fixture
def unwatched(monkeypatch):
    """No trials for attention's share."""
    monkeypatch.setattr(generation, "attention_share", lambda name, work: None)


def test_names():
    tests = Case("prompt", 512, 0), Case("generation", 32, 2048), Case("prompt", 8, 0, 4), Case("generation", 8, 16, 2)
    assert list(map(str, tests)) == ["pp512", "tg32 @ d2048", "pp8 x4", "tg8 x2 @ d16"]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "tokens", "depth", "reads"),
    [
        # mlx-lm processes all but the last token of a prompt, then takes a step with that one.
        ("prompt", 16, 0, [(15, 0), (1, 15)]),
        ("prompt", 1, 0, [(1, 0)]),
        ("prompt", 16, 8, [(15, 8), (1, 23)]),
        ("generation", 3, 0, [(1, 0), (1, 1), (1, 2)]),
        ("generation", 2, 8, [(1, 8), (1, 9)]),
        ("generation", 1, 8, [(1, 8)]),
    ],
)
def test_what_a_trial_reads(loaded, monkeypatch, unwatched, kind, tokens, depth, reads, batch_size):
    """So many tokens at such a depth, and in each trial of both arms the same ones."""
    trials, read, model = [], [], loaded.model

    def spy(inputs, cache):
        trials[-1].append((*inputs.shape, cache[0].size()))
        read[-1].extend(inputs.T.tolist())
        return model(inputs, cache=cache)

    def run(arm, work, flash):
        trials.append([])
        read.append([])
        work()
        return Guesses(), None

    spy.layers = model.layers
    watched = LoadedModel(spy, loaded.tokenizer, loaded.config, "", "", None)
    monkeypatch.setattr(generation, "run", run)
    test = Case(kind, tokens, depth, batch_size)
    pairs = list(generation.measured(watched, [test], repetitions=2, seed=0))
    assert [pair.test for pair in pairs] == [test, test]
    if depth:
        assert sum(size for _, size, _ in trials.pop(0)) == depth  # the cache is filled once
        read.pop(0)
    assert trials == [[(batch_size, *each) for each in reads]] * 6  # warm-up and two repetitions, two arms
    assert read == [read[0]] * 6
    if batch_size > 1 and kind == "prompt" and tokens > 1:
        first, *others = zip(*read[0], strict=True)
        assert all(sequence != first for sequence in others)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_trial_does_not_change_the_cache_of_the_next(loaded, batch_size):
    filled = generation.Filled(generation._cache(loaded, np.arange(10)), [])
    before = [np.array(array) for layer in filled.own for array in layer.state[:2]]
    test = Case("generation", 4, 10, batch_size)
    generation.prepared(loaded, None, test, np.ones((batch_size, 1), int), filled)()
    after = [np.array(array) for layer in filled.own for array in layer.state[:2]]
    assert filled.own[0].offset == 10
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_trial_has_buffers_of_its_own(loaded, batch_size):
    """Else the first append copies, or merges, the whole cache while the clock runs, as memory of the trial."""
    cache = generation._cache(loaded, np.arange(10))
    held = sum(2 * layer.keys[..., :10, :].nbytes for layer in cache)
    mx.synchronize()
    before = mx.get_active_memory()
    if batch_size == 1:
        own = generation._copy(cache)
    else:
        own = generation._batch(loaded, Case("generation", 4, 10, batch_size), cache).prompt_cache
    assert mx.get_active_memory() - before >= batch_size * held
    assert [layer.size() for layer in own] == [10, 10]


def test_a_cache_that_cannot_be_filled(loaded, monkeypatch):
    def fails(*_):
        raise RuntimeError("[metal] Insufficient Memory\nand more")

    monkeypatch.setattr(generation, "_generate", fails)
    with pytest.raises(EvalError, match=r"^filling the cache with 9 tokens fails: \[metal\] Insufficient Memory$"):
        next(generation.measured(loaded, [Case("prompt", 4, 9)], 1, 0))
