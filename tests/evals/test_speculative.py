"""`flash-eval speed --draft-model`: generation by mlx-lm's speculative decoding."""

import csv
import json
from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest
from flash_evals import generation, models
from flash_evals.generation import Case, Draft

COMMAND = ("speed", "-r", 1)  # of `evaluate`

mlx_lm_generate = import_module("mlx_lm.generate")  # mlx_lm has a function of this name


@pytest.mark.parametrize(("more", "ahead", "guesses"), [((), 3, 9), (("--num-draft-tokens", 5), 5, 10)])
def test_a_model_that_drafts_for_itself_is_always_right(evaluate, model_folder, tmp_path, more, ahead, guesses):
    csv_file = tmp_path / "out.csv"
    result = evaluate("-p", 8, "-g", 12, "-d", "0,16", "--draft-model", model_folder, *more, "--csv", csv_file)
    assert [test["test"] for test in result["results"]] == ["pp8", "tg12", "pp8 @ d16", "tg12 @ d16"]
    for test in result["results"]:
        expected = (0, 0, None) if test["kind"] == "prompt" else (guesses, guesses, 1)
        for arm in ("off", "on"):
            trial = test["trials"][0][arm]
            assert (trial["drafted"], trial["accepted"], test[arm]["accepted_share"]) == expected
    name = model_folder.name
    assert result["draft_model"]["name"] == name
    assert result["settings"]["num_draft_tokens"] == ahead
    header, _, titles, *rows = result["page"].splitlines()
    assert f" · {ahead} tokens at a time drafted by {name}, " in header
    assert titles.endswith("accepted off   on")
    assert [row.split()[-2:] for row in rows[:4]] == [["–", "–"], ["100%", "100%"]] * 2
    with csv_file.open(newline="") as file:
        found = {(row["kind"], row["drafted"], row["accepted"]) for row in csv.DictReader(file)}
    assert found == {("prompt", "0", "0"), ("generation", str(guesses), str(guesses))}


@pytest.mark.parametrize("count", [1, 2, 7, 20])
@pytest.mark.parametrize("ahead", [1, 3])
def test_tokens_are_those_of_the_model_and_guesses_are_counted(loaded, make_model, monkeypatch, count, ahead):
    """What the model would have generated alone, from a cache with something in it; each guess is a draft step."""
    prompt, depth = np.array([7]), np.arange(10)
    cache = generation.filled_cache(loaded, depth)
    own = {"max_tokens": count, "prompt_cache": generation._copy(cache)}
    alone = [token for token, _ in mlx_lm_generate.generate_step(mx.array(prompt), loaded.model, **own)]

    draft = Draft(models.load(str(make_model(num_hidden_layers=1))), ahead)
    steps = []
    generate = mlx_lm_generate.speculative_generate_step

    def spy(*arguments, **others):
        for token, logprobs, was_drafted in generate(*arguments, **others):
            steps.append((token, was_drafted))
            yield token, logprobs, was_drafted

    guesses = 0
    call = type(draft.loaded.model).__call__

    def counted(self, inputs, *arguments, **others):
        nonlocal guesses
        guesses += self is draft.loaded.model
        return call(self, inputs, *arguments, **others)

    filled = [cache, generation.filled_cache(draft.loaded, depth)]
    monkeypatch.setattr(mlx_lm_generate, "speculative_generate_step", spy)
    monkeypatch.setattr(type(draft.loaded.model), "__call__", counted)
    work = generation.prepared(loaded, draft, Case("generation", count, len(depth), 1), prompt[None], filled)
    assert work() == (guesses, sum(was_drafted for _, was_drafted in steps))
    assert [token for token, _ in steps] == alone
    assert [layer.offset for cache in filled for layer in cache] == [10, 10, 10]  # the next trial's


def test_another_tokenizer_is_refused(refused, model_folder, make_model):
    folder = make_model()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    tokenizer["model"]["vocab"].popitem()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refused("speed", "--model", model_folder, "-p", 0, "-g", 4, "-d", 0, "--draft-model", folder)
    sizes = [models.load(str(each)).tokenizer.vocab_size for each in (folder, model_folder)]
    assert sizes[0] != sizes[1]
    assert line == (
        f"Error: --draft-model {folder.name} has a tokenizer of {sizes[0]} tokens, "
        f"expected that of {model_folder.name}, with {sizes[1]}"
    )
