"""Tiles that a mask hides whole are skipped: their keys, values and mask elements are never even read."""

import subprocess
from pathlib import Path

import pytest

CASES = {
    # kernel, query_len, key_len, causal, window, start, stop -> the keys that any query sees
    "decode, window 1024 of 32k": (["decode", 1, 32768, 1, 1024, 0, 32768], (31744, 32768)),
    "decode, 8 queries, window": (["decode", 8, 32768, 1, 100, 0, 32768], (32661, 32768)),
    "decode, key range": (["decode", 1, 8192, 0, 0, 3000, 3100], (3000, 3100)),
    "prefill, key range": (["prefill", 200, 8192, 0, 0, 3000, 3100], (3000, 3100)),
    "prefill, causal and left padding": (["prefill", 200, 8192, 1, 0, 5000, 8192], (5000, 8192)),
    "prefill, window behind a long cache": (["prefill", 64, 8192, 1, 64, 0, 8192], (8065, 8192)),
    "prefill, key range outside of the window": (["prefill", 64, 8192, 1, 64, 0, 8000], (0, 0)),
    "causal: the first queries of many": (["block", 4096, 4096, 1, 0, 0, 4096], (0, 64)),
    "window: the first queries of many": (["block", 4096, 8192, 1, 100, 0, 8192], (3997, 4160)),
}


@pytest.fixture
def hidden_memory(drivers: Path) -> Path:
    return drivers / "hidden_memory"


def run(driver: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([driver, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("case", CASES)
def test_hidden_memory_is_not_touched(hidden_memory, case):
    arguments, (begin, end) = CASES[case]
    everything_open = run(hidden_memory, *arguments, 0, arguments[2])
    only_visible_open = run(hidden_memory, *arguments, begin, end)
    assert everything_open.returncode == 0, everything_open.stderr
    assert only_visible_open.returncode == 0, "touched memory of hidden keys"
    assert only_visible_open.stdout == everything_open.stdout


def test_the_driver_notices(hidden_memory):
    arguments, (begin, end) = CASES["decode, key range"]
    assert run(hidden_memory, *arguments, begin + 64, end).returncode != 0
