"""scripts/measure_cuda_table.py: the rows of docs/cuda.md, of which MLX and we compute the same."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "packages/evals/scripts/measure_cuda_table.py"))
TABLE = SCRIPT["TABLE"]
STORED = SCRIPT["STORED"]


def test_the_page_has_its_rows():
    rows = re.findall(r"^\| (.*?) \| .* \| \d+% \| .* \|$", (ROOT / "docs/cuda.md").read_text(encoding="utf-8"), re.M)
    assert rows == list(TABLE)


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
