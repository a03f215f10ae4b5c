"""The command line: help that comes at once, and one line for whatever is wrong, before any work starts."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import mlxlm_flash_startup
import pytest
from flash_evals.cli import COMMANDS
from flash_evals.models import DEMO_MODEL


def test_help_does_not_wait_for_mlx():
    program = (
        "import sys\nfrom flash_evals.cli import main\n"
        "main(['-h'], standalone_mode=False)\nassert not {'mlx', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_only_a_drawing_waits_for_matplotlib():
    program = (
        "import sys\nimport flash_evals.finetune, flash_evals.kernels, flash_evals.report\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_what_is_said_at_once(invoke):
    for option in ("-h", "--help"):
        page = invoke(option)
        assert page.exit_code == 0
        assert all(name in page.output for name in COMMANDS)
    assert invoke("--version").stdout.split()[-1] == version("flash-evals")
    assert invoke("demo-model").stdout == f"{DEMO_MODEL}\n"
    assert invoke("nonsense").exit_code == 2


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_full_disk_leaves_the_page_and_says_so(invoke, model_folder, text_file, option):
    page = invoke("perplexity", "--model", model_folder, "--dataset", text_file, "--context", 64, option, "/dev/full")
    assert page.exit_code == 2
    assert "token perplexity" in page.stdout
    assert page.stderr == "Error: cannot write /dev/full: No space left on device\n"


def test_as_a_person_runs_it(tmp_path):
    """The installed command: no traceback, the line on stderr, nothing on stdout."""
    command = Path(sys.executable).parent / "flash-eval"
    done = subprocess.run([command, "perplexity", "--model", tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: {tmp_path} is not a model folder in mlx-lm's layout: it has no config.json\n"


def test_a_start_up_file_that_would_patch_both_arms(invoke, monkeypatch):
    """`mlxlm-flash hook` with MLXLM_FLASH=1: what is off is off here."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(mlxlm_flash_startup, "_armed", False)
    monkeypatch.setenv("MLXLM_FLASH", "1")
    mlxlm_flash_startup.arm()
    assert any(isinstance(finder, mlxlm_flash_startup.Watch) for finder in sys.meta_path)
    invoke("demo-model")
    assert not any(isinstance(finder, mlxlm_flash_startup.Watch) for finder in sys.meta_path)


def test_the_defaults_need_no_network(in_fresh_process, tmp_path):
    out, cache = tmp_path / "out.json", tmp_path / "hf"
    [outcome] = in_fresh_process(
        ["perplexity", "--max-windows", 4, "--json", out],
        HF_ENDPOINT="http://127.0.0.1:9",  # nobody listens there
        HF_HOME=str(cache),
    )
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("Qwen2 demo, 1.0 M parameters, float32 · pydoc topics, held out, CPython 3.")
    assert not cache.exists()

    result = json.loads(out.read_text())
    assert result["tokens"] == 4 * 256
    assert result["off"]["ppl"] < 100  # it has learned something; of 1,024 tokens an untrained one expects them all
    assert abs(result["paired"]["delta_nll"]) <= 1e-4
    assert result["paired"]["top1_agreement"] == 1
    assert result["flash"] == {"calls": {"cpu_prefill": 4}, "fallbacks": {}}
    assert "Same predictions; " in outcome.stdout
