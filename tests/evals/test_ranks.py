"""`mlx.launch -n N flash-eval perplexity` spreads windows over N ranks. Scores are those of a single process."""

import json
import sys
from statistics import median

import pytest
from mlxlm_flash_patch.blas import REFERENCE, blas

from tests.patch.two_ranks import PROGRAMS, launch
from tests.promises import promise

pytestmark = pytest.mark.slow("processes that import for seconds")

FLASH_EVAL = PROGRAMS / "flash-eval"
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
    stdout, stderr = launch(sys.executable, "-c", DRIVER, *perplexity)
    assert "Error: rank 1: ZeroDivisionError: of rank 1" in stderr
    assert "The run was interrupted: the figures are of the 4 of " in stdout
