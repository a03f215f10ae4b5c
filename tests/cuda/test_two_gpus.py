"""Two GPUs give the results of one GPU. mlx.launch starts a process for each GPU. The processes communicate by NCCL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.patch.two_ranks import launch

SHARDED = Path(__file__).with_name("sharded_model.py")
EVALUATE = "from flash_evals.cli import main; main()"
TIE = 1e-4  # logprobs this close may change their order, because two ranks add numbers in another order


@pytest.fixture(autouse=True)
def two_gpus(requires_gpu):
    if mx.device_count(mx.gpu) < 2:
        pytest.skip("one NVIDIA GPU, not two")


def on_two(*program):
    return launch(sys.executable, *program, backend="nccl", PYTHONPATH=os.pathsep.join(sys.path))


def on_one(*program):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_model_whose_heads_are_shared_out(model_type):
    """Up to the first tie (see TIE), both ranks must give the tokens of one GPU. Both must count the same calls."""
    alone = on_one(SHARDED, model_type)
    stdout, stderr = on_two(SHARDED, model_type)
    ranks = sorted((json.loads(line) for line in stdout.splitlines()), key=lambda rank: rank["rank"])
    assert [(rank["rank"], rank["size"]) for rank in ranks] == [(0, 2), (1, 2)], stderr
    one = json.loads(alone.stdout)
    tie = next((step for step, lead in enumerate(one["leads"]) if lead < TIE), len(one["tokens"]))
    print(f"{model_type}: {tie} of {len(one['tokens'])} tokens before a tie; calls {one['calls']}")
    assert tie > 20
    for rank in ranks:
        assert rank["tokens"][:tie] == one["tokens"][:tie]
        assert rank["leads"][:tie] == pytest.approx(one["leads"][:tie], abs=TIE)
        assert rank["heads"] == one["heads"] // 2
        assert rank["calls"] == one["calls"]
        assert rank["fallbacks"] == {}
    assert set(one["calls"]) == {"cuda_prefill", "cuda_decode"}


def test_the_same_perplexity(tmp_path):
    """The text has three batches of up to four windows. At the end, only rank 0 still has a batch."""
    paths = [tmp_path / f"{n}.json" for n in (1, 2)]
    for path, run in zip(paths, (on_one, on_two), strict=True):
        said = run("-c", EVALUATE, "perplexity", "--context", "256", "--max-windows", "9", "--json", str(path))
        assert path.exists(), said
    alone, shared = (json.loads(path.read_text()) for path in paths)
    print({arm: (alone[arm]["ppl"], shared[arm]["ppl"]) for arm in ("off", "on")}, shared["ranks"])
    for figure in ("tokens", "words", "bytes", "flash", "windows", "paired"):
        assert shared[figure] == alone[figure]
    for arm in ("off", "on"):
        for figure in ("ppl", "ppl_se", "word_ppl", "byte_ppl", "bits_per_byte"):
            assert shared[arm][figure] == alone[arm][figure]
    assert [trial["rank"] for trial in shared["trials"]] == [0, 1, 0]
    assert shared["flash"]["fallbacks"] == {}
