"""The sentence under the table is true of the table."""

import contextlib
import json
import math
import shutil

import mlx.core as mx
import mlxlm_flash_patch
import pytest
from flash_evals.perplexity import verdict


def result(top1=1.0, delta=1e-8, dlogit=1e-5, speed=120.0, memory=30.0, calls=9):
    arms = {
        "off": {"tokens_per_s": 100.0, "peak_memory_mb": 40.0},
        "on": {"tokens_per_s": speed, "peak_memory_mb": memory},
    }
    return {
        "tokens": 20_000,
        **arms,
        "trials": [arms],
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
        ({"speed": 100.1}, "Same predictions; 0.75x the memory, no clear difference in speed."),
        ({"calls": 0}, "The patch never ran: both columns are MLX's own attention."),
        ({"dlogit": math.nan}, "Not comparable: there are logits that are no finite numbers."),
    ],
)
def test_verdict(figures, sentence):
    assert verdict(result(**figures)) == sentence


def test_without_a_memory_to_compare_with_none_is_claimed():
    figures = result()
    figures["off"]["peak_memory_mb"] = 0.0
    assert verdict(figures) == "Same predictions; 1.20x the speed."


def test_logits_that_are_no_numbers(invoke, model_folder, text_file, tmp_path):
    """The page says so, and the result file is still JSON that any reader takes."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), {name: w * math.nan for name, w in weights.items()})
    out = tmp_path / "out.json"
    page = invoke("perplexity", "--model", folder, "--dataset", text_file, "--context", 64, "--json", out)
    assert page.stdout.endswith("Not comparable: there are logits that are no finite numbers.\n")
    assert "top-1 agreement 0.000 %" in page.stdout

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(out.read_text(), parse_constant=refuse)["off"]["ppl"] is None


def test_a_patch_that_does_nothing_is_found_out(invoke, model_folder, text_file, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def nothing():
        yield

    monkeypatch.setattr(mlxlm_flash_patch, "enabled", nothing)
    out = tmp_path / "out.json"
    page = invoke("perplexity", "--model", model_folder, "--dataset", text_file, "--context", 64, "--json", out)
    assert page.exit_code == 0
    assert json.loads(out.read_text())["flash"] == {"calls": {}, "fallbacks": {}}
    assert "flash: no calls, 0 fallbacks" in page.stdout
    assert page.stdout.endswith("The patch never ran: both columns are MLX's own attention.\n")


def test_a_process_that_is_patched_from_the_start_is_refused(refused, model_folder, text_file):
    """Otherwise both arms would be flash, and agree beautifully."""
    with mlxlm_flash_patch.enabled():
        line = refused("perplexity", "--model", model_folder, "--dataset", text_file, "--context", 64)
    assert "run flash-eval without mlxlm-flash run" in line
