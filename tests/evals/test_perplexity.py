"""`flash-eval perplexity`: what a score depends on, what both arms are compared by, and everything it writes."""

import json
import math
import shutil
from contextlib import nullcontext

import mlx.core as mx
import mlxlm_flash_patch
import numpy as np
import pytest
from flash_evals import models, paired
from flash_evals.measure import ARMS, Measurement
from flash_evals.ranks import Ranks
from flash_evals.scoring import windows

COMMAND = ("perplexity",)  # of `evaluate`


@pytest.fixture
def ids(loaded, text):
    return models.encode(loaded, text, "auto").ids


@pytest.fixture
def scores(loaded, ids):
    """Of all scored tokens, by the windows of a plan, read so many at once."""

    def scores(plan, batch_size):
        batches = list(paired.batches(loaded.model, ids, plan, batch_size, ARMS, Ranks()))
        assert sum(batch.trial.windows for batch in batches) == len(plan)
        return np.concatenate([batch.scores for batch in batches])

    return scores


def test_the_comparison_is_of_the_scored_tokens_only(scores, ids, monkeypatch):
    """An arm that differs in what a window reads but does not score does not differ."""
    plan = windows([len(ids)], 24, 8)[1:-1]  # these score the last 8 of 24
    for spoiled, differs in ((16, False), (17, True)):

        def run(arm, work, tokens, flash, spoiled=spoiled):
            logits = work()
            noise = mx.random.normal(logits.shape) * (mx.arange(logits.shape[1]) < spoiled)[:, None]
            return logits + (noise if arm == "on" else 0), Measurement(1.0, tokens, 1.0)

        monkeypatch.setattr(paired, "run", run)
        found = scores(plan, 4)
        assert (found["dlogit"].reshape(-1, 8).max(axis=1) > 0).all() == differs
        assert differs or np.array_equal(found["off"], found["on"])


def test_max_windows_counts_the_words_and_bytes_it_scored(evaluate, loaded, text, ids):
    result = evaluate("--max-windows", 3)
    scored = loaded.tokenizer.decode(ids[: 3 * 24 + 1].tolist())
    assert text.startswith(scored)
    assert (result["tokens"], result["words"], result["bytes"]) == (72, len(scored.split()), len(scored.encode()))
    assert result["windows"] == {"planned": 3, "finished": 3, "resumed": 0}


def test_the_page_and_the_result_file(evaluate, model_folder, text_file):
    result = evaluate("--batch-size", 4)
    lines = [line for line in result["page"].splitlines() if not line.startswith("~")]  # a legend, at times
    assert lines[0].startswith(f"{model_folder.name}, 25.9 k parameters, float32 · text.txt, text ")
    assert f"context 24, stride 24, no BOS · {result['tokens']:,} tokens · " in lines[0]
    assert lines[2].split() == ["patch", "off", "patch", "on", "difference"]
    names = ["token perplexity", "word / byte perplexity", "bits per byte", "prefill tokens/s", "peak memory"]
    assert [line.split("  ")[0] for line in lines[3:8]] == names
    assert lines[9].startswith("top-1 agreement 100.000 % · max |Δlogit| ")
    assert len(lines) == 11

    assert result["model"]["source"] == str(model_folder)
    assert result["dataset"]["source"] == str(text_file)
    assert {"context", "stride", "bos", "batch_size", "max_windows", "memory"} <= set(result["settings"])
    arm = ["ppl", "ppl_se", "word_ppl", "byte_ppl", "bits_per_byte", "tokens_per_s", "peak_memory_mb"]
    assert list(result["off"]) == list(result["on"]) == arm
    assert result["interrupted"] is False
    calls = 2 * len(result["trials"])  # two layers; by the kernel's own count: the patch does something
    assert result["flash"] == {"calls": {"cpu_prefill": calls}, "fallbacks": {}}
    assert lines[9].endswith(f"flash: cpu_prefill {calls:,} calls, 0 fallbacks")
    pair = result["paired"]
    assert list(pair) == ["of", "delta_nll", "delta_nll_se", "max_abs_dlogit", "mean_kl", "top1_agreement"]
    assert abs(pair["delta_nll"]) < 1e-5
    assert 0 < pair["max_abs_dlogit"] < 1e-3
    assert 0 < pair["mean_kl"] < 1e-8
    assert pair["top1_agreement"] == 1

    # Every trial is kept, the arms take turns, and the summary is theirs.
    trials = result["trials"]
    assert [trial["order"] for trial in trials[:3]] == [["off", "on"], ["on", "off"], ["off", "on"]]
    assert sum(trial["windows"] for trial in trials) == result["windows"]["planned"]
    for name in ARMS:
        speeds = [trial[name]["tokens_per_s"] for trial in trials]
        assert result[name]["tokens_per_s"] == pytest.approx(np.median(speeds))
        assert result[name]["peak_memory_mb"] == max(trial[name]["peak_memory_mb"] for trial in trials) > 0
        assert speeds[0] == pytest.approx(trials[0]["tokens"] / trials[0][name]["seconds"])


def test_the_batch_size_changes_no_score(scores, ids):
    """Within 1e-5 per token: a matrix product may sum in another order when it has more rows."""
    plan = windows([len(ids)], 24, 10)
    one = scores(plan, 1)
    for batch_size in (2, 5, len(plan), 10 * len(plan)):
        other = scores(plan, batch_size)
        for arm in ARMS:
            np.testing.assert_allclose(other[arm]["nll"], one[arm]["nll"], atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_order_of_the_windows_changes_no_score(scores, ids, batch_size, monkeypatch):
    """Bit for bit: the same windows in batches of the same size, which begin and end elsewhere, and however many tokens
    are looked at together.
    """
    plan = windows([len(ids)], 24, 8)
    plan = plan[: len(plan) // batch_size * batch_size]
    ends = np.cumsum([window.end + 1 - window.first_scored for window in plan])[:-1]
    forwards = scores(plan, batch_size)
    monkeypatch.setattr(paired, "ROWS_AT_ONCE", 3)
    backwards = scores(plan[::-1], batch_size)
    back = np.split(backwards, len(backwards) - ends[::-1])[::-1]
    np.testing.assert_array_equal(np.concatenate(back), forwards)


def test_logits_that_are_no_numbers(evaluate, model_folder, tmp_path):
    """The page says so, and the result file is still JSON that any reader takes."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), {name: w * math.nan for name, w in weights.items()})
    page = evaluate("--model", folder)["page"]
    assert page.endswith("Not comparable: there are logits that are no finite numbers.\n")
    assert "top-1 agreement 0.000 %" in page
    assert json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)["off"]["ppl"] is None


def test_a_patch_that_does_nothing_is_found_out(evaluate, monkeypatch):
    monkeypatch.setattr(mlxlm_flash_patch, "enabled", nullcontext)
    result = evaluate()
    assert result["flash"] == {"calls": {}, "fallbacks": {}}
    assert "flash: no calls, 0 fallbacks" in result["page"]
    assert result["page"].endswith("The patch never ran: all of this is MLX's own attention.\n")
