"""`flash-eval perplexity`: its figures against a slow independent computation, and everything it writes."""

import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import mlx.core as mx
import numpy as np
import pytest
from flash_evals import models, paired
from flash_evals.models import LoadedModel
from flash_evals.scoring import windows

Invoke = Callable[..., click.testing.Result]


def slow_nll(loaded: LoadedModel, ids: np.ndarray, context: int, stride: int) -> np.ndarray:
    """The cost of each token but the first: one forward for each, over all the tokens its window lets it see."""
    costs = []
    for token in range(1, len(ids)):
        # The last token that the same window scores.
        later = max(0, math.ceil((token - context) / stride))
        last = min(context + later * stride, len(ids) - 1)
        seen = ids[max(0, last - context) : token]
        logits = np.array(loaded.model(mx.array(seen)[None])[0, -1]).astype(np.float64)
        costs.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[ids[token]])
    return np.array(costs)


@pytest.fixture
def evaluate(invoke: Invoke, model_folder: Path, text_file: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command on the tiny model and text, and gives the result file; later arguments win."""

    def run(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
        out = tmp_path / "out.json"
        always = ("--model", model_folder, "--dataset", text_file, "--context", 24)
        result = invoke("perplexity", *always, "--json", out, *arguments)
        assert (result.exit_code, result.stderr) == (exit_code, ""), result.output
        return {**json.loads(out.read_text()), "page": result.stdout}

    return run


@pytest.mark.parametrize(("context", "stride"), [(24, 24), (24, 7), (24, 1), (2, 2), (128, 64), (128, 128)])
def test_against_one_forward_per_token(
    evaluate: Callable[..., dict[str, Any]], loaded: LoadedModel, text: str, context: int, stride: int
) -> None:
    result = evaluate("--context", context, "--stride", stride)
    nll = slow_nll(loaded, models.encode(loaded, text).ids, context, stride)
    assert result["tokens"] == len(nll)
    for arm in ("off", "on"):
        assert result[arm]["ppl"] == pytest.approx(np.exp(nll.mean()), rel=2e-5)
        assert result[arm]["ppl_se"] == pytest.approx(result["off"]["ppl"] * nll.std(ddof=1) / len(nll) ** 0.5)
        assert math.log(result[arm]["word_ppl"]) == pytest.approx(nll.sum() / len(text.split()), rel=1e-5)
        assert math.log(result[arm]["byte_ppl"]) == pytest.approx(nll.sum() / len(text.encode()), rel=1e-5)
        assert result[arm]["bits_per_byte"] == pytest.approx(nll.sum() / len(text.encode()) / math.log(2))


def test_with_a_bos_the_first_token_is_scored_too(
    evaluate: Callable[..., dict[str, Any]], make_model: Callable[..., Path], text: str
) -> None:
    folder = make_model(bos=True)
    loaded = models.load(str(folder))
    ids = models.encode(loaded, text).ids
    result = evaluate("--model", folder)
    assert result["settings"]["bos"]
    assert result["tokens"] == len(ids) - 1 == len(loaded.tokenizer.encode(text, add_special_tokens=False))
    assert result["off"]["ppl"] == pytest.approx(np.exp(slow_nll(loaded, ids, 24, 24).mean()), rel=2e-5)
    assert "stride 24, BOS ·" in result["page"]


def test_both_arms_agree_and_flash_did_it(evaluate: Callable[..., dict[str, Any]]) -> None:
    """This test fails if the patch silently does nothing: the calls are the kernel's own count."""
    result = evaluate("--batch-size", 5)
    calls = 2 * len(result["trials"])  # two layers
    assert result["flash"] == {"calls": {"cpu_prefill": calls}, "fallbacks": {}}
    assert abs(result["paired"]["delta_nll"]) < 1e-5
    assert 0 < result["paired"]["max_abs_dlogit"] < 1e-3
    assert 0 < result["paired"]["mean_kl"] < 1e-8
    assert result["paired"]["top1_agreement"] == 1
    assert f"flash: cpu_prefill {calls:,} calls, 0 fallbacks" in result["page"]
    assert "Same predictions; " in result["page"]


def test_the_comparison_is_of_the_scored_tokens_only(
    loaded: LoadedModel, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm that differs in what a window reads but does not score does not differ."""
    ids = models.encode(loaded, text).ids
    plan = windows(len(ids), 24, 8)[1:]  # these score the last 8 of 24
    monkeypatch.setattr(paired, "run", lambda arm, work, flash: (spoiled(work(), arm, until=16), TRIAL))
    batches = list(paired.measured(loaded.model, ids, plan, 4))
    assert all(batch.max_abs_dlogit == 0 for batch in batches)
    assert all(np.array_equal(batch.scores["off"].nll, batch.scores["on"].nll) for batch in batches)
    monkeypatch.setattr(paired, "run", lambda arm, work, flash: (spoiled(work(), arm, until=17), TRIAL))
    batches = list(paired.measured(loaded.model, ids, plan, 4))
    assert all(batch.max_abs_dlogit > 0 for batch in batches)


TRIAL = paired.Trial(seconds=1.0, peak_memory=1)


def spoiled(logits: mx.array, arm: str, until: int) -> mx.array:
    noise = mx.random.normal(logits[:, :until].shape) if arm == "on" else 0
    return mx.concatenate([logits[:, :until] + noise, logits[:, until:]], axis=1)


def test_max_windows_counts_the_words_and_bytes_it_scored(
    evaluate: Callable[..., dict[str, Any]], loaded: LoadedModel, text: str
) -> None:
    result = evaluate("--max-windows", 3)
    ids = models.encode(loaded, text).ids
    scored = loaded.tokenizer.decode(ids[: 3 * 24 + 1].tolist())
    assert text.startswith(scored)
    assert (result["tokens"], result["words"], result["bytes"]) == (72, len(scored.split()), len(scored.encode()))
    assert result["windows"] == {"planned": 3, "finished": 3, "resumed": 0}
    assert not result["interrupted"]
    total = slow_nll(loaded, ids, 24, 24)[:72].sum()
    assert math.log(result["on"]["byte_ppl"]) == pytest.approx(total / len(scored.encode()), rel=1e-5)


def test_half_precision(evaluate: Callable[..., dict[str, Any]], make_model: Callable[..., Path]) -> None:
    """The sentence at the end says what the figures say, whatever that is."""
    result = evaluate("--model", make_model(dtype=mx.bfloat16))
    assert result["model"]["dtype"] == "bfloat16"
    assert result["paired"]["max_abs_dlogit"] > 1e-3
    same = result["paired"]["top1_agreement"] == 1 and abs(result["paired"]["delta_nll"]) <= 1e-4
    assert ("Same predictions" if same else "Predictions differ: top-1 at") in result["page"]


def test_the_result_file(evaluate: Callable[..., dict[str, Any]], model_folder: Path, text_file: Path) -> None:
    result = evaluate("--batch-size", 4)
    assert result["model"]["source"] == str(model_folder)
    assert result["dataset"]["source"] == str(text_file)
    assert result["dataset"]["fingerprint"].startswith("sha256:")
    for setting in ("context", "stride", "bos", "batch_size", "max_windows", "memory"):
        assert setting in result["settings"]
    arm = ["ppl", "ppl_se", "word_ppl", "byte_ppl", "bits_per_byte", "tokens_per_s", "peak_memory_mb"]
    assert list(result["off"]) == list(result["on"]) == arm
    paired_keys = ["of", "delta_nll", "delta_nll_se", "max_abs_dlogit", "mean_kl", "top1_agreement"]
    assert list(result["paired"]) == paired_keys
    assert list(result["flash"]) == ["calls", "fallbacks"]
    assert result["machine"]["versions"]["mlx"]
    assert result["interrupted"] is False

    # Every trial is kept, the arms take turns, and the summary is theirs.
    trials = result["trials"]
    orders = [["off", "on"], ["on", "off"]]
    assert [trial["order"] for trial in trials] == [orders[n % 2] for n in range(len(trials))]
    assert sum(trial["windows"] for trial in trials) == result["windows"]["planned"]
    for name in ("off", "on"):
        speeds = [trial[name]["tokens_per_s"] for trial in trials]
        assert result[name]["tokens_per_s"] == pytest.approx(np.median(speeds))
        assert result[name]["peak_memory_mb"] == max(trial[name]["peak_memory_mb"] for trial in trials) > 0
        assert speeds[0] == pytest.approx(trials[0]["tokens"] / trials[0][name]["seconds"])


def test_the_page(evaluate: Callable[..., dict[str, Any]], model_folder: Path, text_file: Path) -> None:
    result = evaluate()
    lines = result["page"].splitlines()
    assert lines[0].startswith(f"{model_folder.name}, 25.9 k parameters, float32 · text.txt, text ")
    assert f"context 24, stride 24, no BOS · {result['tokens']:,} tokens · " in lines[0]
    assert [line.split("  ")[0] for line in lines[3:8]] == [
        "token perplexity",
        "word / byte perplexity",
        "bits per byte",
        "prefill tokens/s",
        "peak memory",
    ]
    assert lines[2].split() == ["patch", "off", "patch", "on", "difference"]
    assert lines[9].startswith("top-1 agreement 100.000 % · max |Δlogit| ")
    assert len(lines) == 11


def test_csv_has_a_row_for_each_trial_of_each_arm(evaluate: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    result = evaluate("--csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["batch"]), row["arm"]) for row in rows] == [
        (number, arm) for number, trial in enumerate(result["trials"]) for arm in trial["order"]
    ]
    first = result["trials"][0]
    assert float(rows[0]["seconds"]) == first["off"]["seconds"]
    assert int(rows[0]["tokens"]) == first["tokens"]


def test_rows_compared_at_once_change_nothing(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(60, dtype=np.int32) * 7 % 300
    plan = windows(len(ids), 24, 10)

    def measured(rows: int) -> list[np.ndarray]:
        monkeypatch.setattr(paired, "ROWS_AT_ONCE", rows)
        batches = list(paired.measured(loaded.model, ids, plan, 2))
        return [
            np.concatenate([batch.scores["on"].nll for batch in batches]),
            np.concatenate([batch.kl for batch in batches]),
        ]

    for few, many in zip(measured(1), measured(1000), strict=True):
        np.testing.assert_array_equal(few, many)


def test_results_are_written_before_they_are_printed(model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [Path(sys.executable).parent / "flash-eval", "perplexity", "--model", model_folder]
    command += ["--dataset", text_file, "--context", "32", "--json", out]
    with open("/dev/full", "w") as full:
        done = subprocess.run(list(map(str, command)), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    assert json.loads(out.read_text())["interrupted"] is False
