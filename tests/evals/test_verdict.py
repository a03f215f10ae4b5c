"""The sentence under the table is true of the table."""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import mlx.core as mx
import mlxlm_flash_patch
import pytest
from flash_evals.perplexity import verdict


def result(
    top1: float = 1.0,
    delta: float = 1e-8,
    dlogit: float = 1e-5,
    speed: float = 120.0,
    memory: float = 30.0,
    calls: int = 9,
) -> dict[str, Any]:
    return {
        "tokens": 20_000,
        "off": {"tokens_per_s": 100.0, "peak_memory_mb": 40.0},
        "on": {"tokens_per_s": speed, "peak_memory_mb": memory},
        "paired": {"of": ["off", "on"], "top1_agreement": top1, "delta_nll": delta, "max_abs_dlogit": dlogit},
        "flash": {"calls": {"cpu_prefill": calls} if calls else {}, "fallbacks": {}},
        "compared": None,
    }


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({}, "Same predictions; 1.20x the speed, 0.75x the memory."),
        ({"speed": 50.0, "memory": 80.0}, "Same predictions; 0.50x the speed, 2.00x the memory."),
        ({"delta": -9e-5}, "Same predictions; 1.20x the speed, 0.75x the memory."),
        (
            {"delta": 1.1e-4},
            "Predictions differ: top-1 at 0 of 20,000 tokens, ΔNLL +1.1e-04; 1.20x the speed, 0.75x the memory.",
        ),
        (
            {"top1": 19_999 / 20_000},
            "Predictions differ: top-1 at 1 of 20,000 tokens, ΔNLL +1.0e-08; 1.20x the speed, 0.75x the memory.",
        ),
        ({"memory": 0.0}, "Same predictions; 1.20x the speed, 0.00x the memory."),
        ({"calls": 0}, "The patch never ran: both columns are MLX's own attention."),
        ({"dlogit": math.nan}, "Not comparable: there are logits that are no finite numbers."),
    ],
)
def test_verdict(figures: dict[str, float], sentence: str) -> None:
    assert verdict(result(**figures)) == sentence


def test_without_a_memory_to_compare_with_none_is_claimed() -> None:
    figures = result()
    figures["off"]["peak_memory_mb"] = 0.0
    assert verdict(figures) == "Same predictions; 1.20x the speed."


def test_logits_that_are_no_numbers(
    invoke: Callable[..., click.testing.Result], model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    """The page says so, and the result file is still JSON that any reader takes."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), {name: w * math.nan for name, w in weights.items()})
    out = tmp_path / "out.json"
    page = invoke("perplexity", "--model", folder, "--dataset", text_file, "--context", 64, "--json", out)
    assert page.stdout.endswith("Not comparable: there are logits that are no finite numbers.\n")
    assert "top-1 agreement 0.000 %" in page.stdout

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(out.read_text(), parse_constant=refuse)["off"]["ppl"] is None


def test_a_patch_that_does_nothing_is_found_out(
    invoke: Callable[..., click.testing.Result],
    model_folder: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.contextmanager
    def nothing() -> Iterator[None]:
        yield

    monkeypatch.setattr(mlxlm_flash_patch, "enabled", nothing)
    out = tmp_path / "out.json"
    page = invoke("perplexity", "--model", model_folder, "--dataset", text_file, "--context", 64, "--json", out)
    assert page.exit_code == 0
    assert json.loads(out.read_text())["flash"] == {"calls": {}, "fallbacks": {}}
    assert "flash: no calls, 0 fallbacks" in page.stdout
    assert page.stdout.endswith("The patch never ran: both columns are MLX's own attention.\n")


def test_a_process_that_is_patched_from_the_start_is_refused(
    refused: Callable[..., str], model_folder: Path, text_file: Path
) -> None:
    """Otherwise both arms would be flash, and agree beautifully."""
    with mlxlm_flash_patch.enabled():
        line = refused("perplexity", "--model", model_folder, "--dataset", text_file, "--context", 64)
    assert "run flash-eval without mlxlm-flash run" in line
