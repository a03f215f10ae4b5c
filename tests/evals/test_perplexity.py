"""Tests the page and the result file of `flash-eval perplexity`, and that scores do not depend on the batches."""

import re

import numpy as np
import pytest
from flash_evals.results.arms import ARMS
from flash_evals.work import models, paired
from flash_evals.work.ranks import Ranks
from flash_evals.work.scoring import windows

from tests.promises import promise


@pytest.fixture
def ids(loaded, text):
    return models.encode(loaded, text, "auto").ids


@pytest.fixture
def scores(loaded, ids):
    """scores(windows, batch_size): the scores of the tokens in these windows, read in batches of this size."""

    def scores(windows, batch_size):
        batches = list(paired.batches(loaded.model, ids, windows, batch_size, ARMS, Ranks()))
        assert sum(batch.trial.windows for batch in batches) == len(windows)
        return np.concatenate([batch.scores for batch in batches])

    return scores


def test_the_page_and_the_result_file(run_command, loaded, model_folder, text_file, text, ids):
    result = run_command("perplexity", "--max-windows", 10)
    assert result["page"].startswith(f"{model_folder.name}, 25.9 k parameters, float32 · text.txt, text ")
    assert " · context 24, stride 24, no BOS · 240 tokens · " in result["page"]
    assert re.search("\ntop-1 agreement 100.000 % · .* · flash: cpu_prefill 6 calls, 0 fallbacks\n", result["page"])
    assert result["model"]["source"] == str(model_folder)
    assert result["dataset"]["source"] == str(text_file)
    assert result["windows"] == {"planned": 10, "finished": 10, "resumed": 0}
    assert result["interrupted"] is False
    scored = loaded.tokenizer.decode(ids[:241].tolist())
    assert text.startswith(scored)
    assert (result["tokens"], result["words"], result["bytes"]) == (240, len(scored.split()), len(scored.encode()))
    # Each of two layers calls flash attention once for each of three batches.
    assert result["flash"] == {"calls": {"cpu_prefill": 2 * 3}, "fallbacks": {}, "left": {}}
    assert abs(result["paired"]["delta_nll"]) < 1e-5
    assert 0 < result["paired"]["max_abs_dlogit"] < 1e-3
    assert 0 < result["paired"]["mean_kl"] < 1e-8
    assert result["paired"]["top1_agreement"] == 1

    # The file has every trial. The arms take turns at going first. An arm's figures are computed from its trials.
    trials = result["trials"]
    assert [trial["order"] for trial in trials] == [["off", "on"], ["on", "off"], ["off", "on"]]
    assert [trial["windows"] for trial in trials] == [4, 4, 2]
    for name in ARMS:
        speeds = [trial[name]["tokens_per_s"] for trial in trials]
        assert result[name]["tokens_per_s"] == pytest.approx(np.median(speeds))
        assert result[name]["peak_memory_mb"] == max(trial[name]["peak_memory_mb"] for trial in trials) > 0
        assert speeds[0] == pytest.approx(trials[0]["tokens"] / trials[0][name]["seconds"])


@promise("scores do not depend on the batch size")
@pytest.mark.slow("4 seconds")
def test_the_batch_size_changes_no_score(scores, ids):
    """Scores agree within 1e-5 per token, not exactly, because a matrix product with more rows may sum differently."""
    plan = windows([len(ids)], 24, 10)
    one = scores(plan, 1)
    for batch_size in (2, 5, len(plan), 10 * len(plan)):
        other = scores(plan, batch_size)
        for arm in ARMS:
            np.testing.assert_allclose(other[arm]["nll"], one[arm]["nll"], atol=1e-5)


@promise("scores do not depend on the order")
@pytest.mark.slow("7 seconds")
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_order_of_the_windows_changes_no_score(scores, ids, batch_size, monkeypatch):
    """Scores are bitwise equal if windows are read in another order, or if more or fewer tokens are scored at once."""
    plan = windows([len(ids)], 24, 8)
    plan = plan[: len(plan) // batch_size * batch_size]
    ends = np.cumsum([window.end + 1 - window.first_scored for window in plan])[:-1]
    forwards = scores(plan, batch_size)
    monkeypatch.setattr(paired, "ROWS_AT_ONCE", 3)
    backwards = scores(plan[::-1], batch_size)
    back = np.split(backwards, len(backwards) - ends[::-1])[::-1]
    np.testing.assert_array_equal(np.concatenate(back), forwards)
