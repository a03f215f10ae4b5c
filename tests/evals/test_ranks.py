"""`mlx.launch -n N flash-eval perplexity` spreads windows over N ranks. Scores are those of a single process."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from mlxlm_flash_patch.blas import REFERENCE, blas

from tests.promises import promise

pytestmark = pytest.mark.slow("processes that import for seconds")

MLX_LAUNCH = "from mlx._distributed_utils.launch import main; main()"  # also works if MLX is only on PYTHONPATH
# Runs flash-eval with a fault in rank 1: its second batch raises an error.
DRIVER = """
import os, sys
from flash_evals import cli
from flash_evals.work import paired
measure, batches = paired._measure, []

def failing(*args, **others):
    batches.append(args)
    if os.environ["MLX_RANK"] == "1" and len(batches) == 1 + 2:
        raise ZeroDivisionError("of rank 1")
    return measure(*args, **others)

paired._measure = failing
cli.main(sys.argv[1:])
"""


def launch(*program):
    """Runs two processes of a program with mlx.launch. Returns their stdout and stderr."""
    options = ["-n", "2", "--backend", "ring", "--starting-port", str(_two_free_ports())]
    # The processes have a session of their own, so that the test can kill both ranks if they wait for each other.
    with subprocess.Popen(
        [sys.executable, "-c", MLX_LAUNCH, *options, *map(str, program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _two_free_ports():
    """The first of two adjacent free ports."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


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
    stdout, stderr = launch(Path(sys.executable).parent / "flash-eval", *two)
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
    stdout, stderr = launch(sys.executable, "-c", DRIVER, *perplexity)
    assert "Error: rank 1: ZeroDivisionError: of rank 1" in stderr
    assert "The run was interrupted: the figures are of the 4 of " in stdout
