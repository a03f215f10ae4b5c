"""`mlx.launch -n N flash-eval perplexity` spreads windows over N ranks. Scores are those of a single process."""

import json
import os
import signal
import sys
import time
from statistics import median

import pytest
from flash_evals.work import machine
from mlxlm_flash_patch.blas import REFERENCE, blas

from tests.patch.two_ranks import PROGRAMS, launch
from tests.promises import promise

pytestmark = pytest.mark.slow("processes that import for seconds")

FLASH_EVAL = PROGRAMS / "flash-eval"
# Runs flash-eval with a fault in rank 1. "bug": the rank's second batch raises an error. "die": in its second batch,
# the rank waits until the file has two batches, and dies. "text": the rank reads another text than rank 0.
DRIVER = """
import os, sys, time
from flash_evals import cli
from flash_evals.work import data, paired
rank, how, *arguments = os.environ["MLX_RANK"], *sys.argv[1:]
measure, batches = paired._measure, []

def failing(*args, **others):
    batches.append(args)
    if rank == "1" and len(batches) == 1 + 2:
        if how == "die":
            while open(arguments[-1]).read().count("\\n") < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        raise ZeroDivisionError("of rank 1")
    return measure(*args, **others)

load = data.load
if how == "text":
    data.load = lambda *datasets, **named: load(*(["pydoc"] if rank == "1" else datasets), **named)
else:
    paired._measure = failing
cli.main(arguments)
"""


def scores(path):
    return [json.loads(line)["scores"] for line in path.read_text().splitlines()[1:]]


@promise("scores do not depend on the number of ranks")
def test_the_same_scores(invoke, perplexity, same_scores, tmp_path):
    """Two ranks share three batches, and get the scores of a single process, bit for bit."""
    one, two = (
        [*perplexity, "--max-windows", 5, "--json", tmp_path / f"{n}.json", "--save-logprobs", tmp_path / f"{n}.jsonl"]
        for n in (1, 2)
    )
    assert invoke(*one).exit_code == 0
    stdout, stderr = launch(FLASH_EVAL, *two)
    alone, shared = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    same_scores(shared, alone)
    assert shared["windows"] == alone["windows"], stderr
    assert scores(tmp_path / "2.jsonl") == scores(tmp_path / "1.jsonl")

    # Both ranks work, and only one prints.
    assert [trial["rank"] for trial in shared["trials"]] == [0, 1, 0]
    assert stdout.count("token perplexity") == 1
    assert stderr.count(REFERENCE) == int(blas() == "reference")
    assert "prefill tokens/s, each rank   " in stdout
    assert "2 ranks together   " in stdout
    medians = [median(trial["on"]["tokens_per_s"] for trial in shared["trials"] if trial["rank"] == r) for r in (0, 1)]
    assert shared["ranks"]["tokens_per_s"]["on"] == pytest.approx(sum(medians))


@promise("a rank that fails ends all ranks and keeps the measurements")
def test_an_error_in_one_rank_ends_all_and_keeps_what_is_measured(perplexity):
    stdout, stderr = launch(sys.executable, "-c", DRIVER, "bug", *perplexity)
    assert "Error: rank 1: ZeroDivisionError: of rank 1" in stderr
    assert "The run was interrupted: the figures are of the 4 of " in stdout


@pytest.mark.nightly("three processes, which import for seconds")
def test_a_rank_that_dies_ends_all(invoke, perplexity, tmp_path, monkeypatch):
    """If a rank dies, mlx.launch ends all ranks. Later, any number of ranks can continue after the saved batches."""
    monkeypatch.setattr(machine, "blas", blas)  # the machine's real BLAS, as in the processes of launch()
    path, whole = tmp_path / "run.jsonl", tmp_path / "whole.jsonl"
    launch(sys.executable, "-c", DRIVER, "die", *perplexity, "--resume", path)
    assert len(scores(path)) == 2
    launch(FLASH_EVAL, *perplexity, "--max-windows", 8, "--resume", path)
    assert len(scores(path)) == 4
    for option, file in (("--resume", path), ("--save-logprobs", whole)):
        assert invoke(*perplexity, option, file).exit_code == 0
    assert scores(path) == scores(whole)


@pytest.mark.nightly("three processes, which import for seconds")
def test_what_is_refused_is_said_once(perplexity):
    """If ranks read different texts, only one rank prints the error."""
    stdout, stderr = launch(sys.executable, "-c", DRIVER, "text", *perplexity)
    assert stdout == ""
    assert "Error: rank 1 differs from rank 0 in text, model or settings" in stderr
    assert stderr.count("Error") == 1


@pytest.mark.nightly("three processes, which import for seconds")
def test_ctrl_c_keeps_what_is_measured(perplexity, tmp_path):
    """A terminal sends Ctrl-C to all processes. mlx.launch stops printing, but the ranks still write the files."""
    out, path = tmp_path / "out.json", tmp_path / "run.jsonl"

    def interrupt(process):
        while process.poll() is None and not (path.exists() and path.read_text().count("\n") > 2):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)

    long = ["--stride", 1, "--batch-size", 1]
    launch(FLASH_EVAL, *perplexity, *long, "--json", out, "--resume", path, during=interrupt)
    result = json.loads(out.read_text())
    assert result["interrupted"]
    assert result["windows"]["finished"] == len(scores(path)) < result["windows"]["planned"]
