"""The scripts that measure the tables of docs/cuda.md: the page has their rows, and MLX and we compute the same."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "packages/evals/scripts"
SCRIPT = runpy.run_path(str(SCRIPTS / "measure_cuda_table.py"))
TABLE = SCRIPT["TABLE"]
PAGE = (ROOT / "docs/cuda.md").read_text(encoding="utf-8")
STORED = SCRIPT["STORED"]


@pytest.fixture(scope="module")
def gradients():
    sys.path.insert(0, str(SCRIPTS))  # as Python has it that runs the script: it imports the other
    try:
        return runpy.run_path(str(SCRIPTS / "measure_cuda_gradients.py"))
    finally:
        sys.path.remove(str(SCRIPTS))


def test_the_page_has_its_rows(gradients):
    assert re.findall(r"^\| (.*?) \| .* \| \d+% \| .* \|$", PAGE, re.M) == list(TABLE)
    _, _, training = PAGE.partition("| call | backward alone, ms |")
    assert re.findall(r"^\| (.*?) \|", training.partition("\n\n")[0], re.M) == list(gradients["TABLE"])


@pytest.mark.parametrize("name", TABLE | STORED)
def test_both_compute_the_same(name):
    def small(length):
        return length if length <= 16 else length // 128

    call = (TABLE | STORED)[name]
    lengths = {"query_len": small(call.query_len), "seq_len": small(call.seq_len)}
    call = replace(call, **lengths, window=call.window and 5, padding=tuple(n // 128 for n in call.padding))
    found = SCRIPT["measured"](call, trials=1)
    own, ours, *faster = found["errors"]
    bound = (1e-6, 1e-6) if call.dtype == "float32" else (60 if call.kv_bits else 5, 1.01)
    assert own < bound[0]
    assert ours < bound[1]
    assert all(each in (own, ours) for each in faster)
    assert min(found["stream"] + found["chain"]) > 0


GRADIENTS = ("causal, batch of 4, 14/2x64, 2080²", "window 512, 28/4x128, 4096²", "float32, causal, 28/4x128, 4096²")


@pytest.mark.parametrize("name", [*GRADIENTS, "soft-cap 50, 8/4x256, 4096²"])
def test_both_compute_the_same_gradients(gradients, name):
    call = gradients["TABLE"][name]
    call = replace(call, query_len=33, seq_len=33, window=call.window and 5)
    found = gradients["measured"](call, trials=1)
    for errors, bound in zip(found["errors"], (1e-6, 1e-6) if call.dtype == "float32" else (5, 2), strict=True):
        assert max(errors) < bound
    assert min(found["backward"] + found["both"]) > 0
