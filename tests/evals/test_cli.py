"""`flash-eval` shows its help at once and needs no network by default. After a signal it keeps what it has measured."""

import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from flash_evals.cli import COMMANDS
from flash_evals.work import machine
from flash_evals.work.models import DEMO_MODEL

from tests.promises import promise


def test_what_is_said_at_once(invoke):
    for option in ("-h", "--help"):
        page = invoke(option)
        assert page.exit_code == 0
        assert all(name in page.output for name in COMMANDS)
    assert invoke("--version").stdout.split()[-1] == version("flash-evals")
    assert invoke("demo-model").stdout == f"{DEMO_MODEL}\n"
    assert invoke("nonsense").exit_code == 2


def test_a_full_disk_leaves_the_page_and_says_so(invoke, perplexity):
    page = invoke(*perplexity, "--max-windows", 1, "--json", "/dev/full")
    assert page.exit_code == 2
    assert "token perplexity" in page.stdout
    assert page.stderr == "Error: cannot write /dev/full: No space left on device\n"


@promise("SIGTERM keeps the measurements, and ends with 143")
@pytest.mark.slow("5 seconds")
def test_a_batch_system_s_signal_keeps_what_is_measured(perplexity, tmp_path):
    """SIGTERM, which batch systems send, does the same as Ctrl-C, except for the exit code."""
    out, scores = tmp_path / "out.json", tmp_path / "scores.jsonl"
    long = [*perplexity, "--stride", 1, "--batch-size", 1, "--json", out, "--save-logprobs", scores]
    program = Path(sys.executable).parent / "flash-eval"
    with subprocess.Popen([program, *map(str, long)], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (scores.exists() and scores.read_text().count("\n") > 2):
            time.sleep(0.01)
        process.terminate()
        page, _ = process.communicate()
    assert process.returncode == 143
    result = json.loads(out.read_text())
    assert result["interrupted"]
    finished, planned = result["windows"]["finished"], result["windows"]["planned"]
    assert page.endswith(f"the figures are of the {finished} of {planned} windows that were finished.\n")


def test_it_comes_before_anything_is_measured(invoke, monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda: signal.raise_signal(signal.SIGTERM))
    page = invoke("speed")
    assert (page.exit_code, page.stdout, page.stderr) == (143, "", "Interrupted.\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the handler is restored


@promise("the defaults need no network, and both arms agree")
@pytest.mark.slow("14 seconds")
def test_the_defaults_need_no_network(in_fresh_process, tmp_path):
    out, cache = tmp_path / "out.json", tmp_path / "hf"
    [outcome] = in_fresh_process(
        ["perplexity", "--max-windows", 4, "--json", out],
        HF_ENDPOINT="http://127.0.0.1:9",  # nothing listens there
        HF_HOME=str(cache),
    )
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("Qwen2 demo, 1.0 M parameters, float32 · pydoc topics, held out, CPython 3.")
    assert not cache.exists()

    result = json.loads(out.read_text())
    assert result["tokens"] == 4 * 256
    assert result["off"]["ppl"] < 100  # an untrained model has about 1,024, the size of the vocabulary
    assert abs(result["paired"]["delta_nll"]) <= 1e-4
    assert result["paired"]["top1_agreement"] == 1
    assert result["flash"] == {"calls": {"cpu_prefill": 4}, "fallbacks": {}, "left": {}}
    assert "Same predictions; " in outcome.stdout
