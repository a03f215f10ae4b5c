"""A tile that a mask hides entirely is skipped. Its keys, values and mask elements are never read."""

import subprocess

import pytest

from tests.core.programs import run
from tests.promises import promise

CASES = {
    # (kernel, query_len, key_len, causal, window, start, stop), (the first visible key, the key after the last)
    "decode, window 1024 of 32k": (["decode", 1, 32768, 1, 1024, 0, 32768], (31744, 32768)),
    "decode, 8 queries, window": (["decode", 8, 32768, 1, 100, 0, 32768], (32661, 32768)),
    "decode, key range": (["decode", 1, 8192, 0, 0, 3000, 3100], (3000, 3100)),
    "prefill, key range": (["prefill", 200, 8192, 0, 0, 3000, 3100], (3000, 3100)),
    "prefill, causal and left padding": (["prefill", 200, 8192, 1, 0, 5000, 8192], (5000, 8192)),
    "prefill, window behind a long cache": (["prefill", 64, 8192, 1, 64, 0, 8192], (8065, 8192)),
    "prefill, key range outside of the window": (["prefill", 64, 8192, 1, 64, 0, 8000], (0, 0)),
    "prefill, an array that hides": (["array_prefill", 200, 8192, 0, 0, 3000, 3100], (3000, 3100)),
    "prefill, an array and causal": (["array_prefill", 200, 8192, 1, 0, 4090, 8100], (4090, 8100)),
    "prefill, an array that hides all": (["array_prefill", 200, 8192, 0, 0, 0, 0], (0, 0)),
    "decode, an array that hides": (["array_decode", 1, 8192, 0, 0, 3000, 3100], (3000, 3100)),
    "decode, 8 queries, an array that hides": (["array_decode", 8, 8192, 0, 0, 3000, 8192], (3000, 8192)),
    "causal: the first queries of many": (["block", 4096, 4096, 1, 0, 0, 4096], (0, 64)),
    "window: the first queries of many": (["block", 4096, 8192, 1, 100, 0, 8192], (3997, 4160)),
}


@promise("hidden tiles are not read, for descriptions and arrays")
@pytest.mark.parametrize("case", CASES)
def test_hidden_memory_is_not_touched(drivers, case):
    """Only the memory of visible keys, values and mask elements is accessible. Any other read ends the program."""
    arguments, (begin, end) = CASES[case]
    everything_open = run(drivers / "hidden_memory", *arguments, 0, arguments[2])
    assert run(drivers / "hidden_memory", *arguments, begin, end) == everything_open


def test_the_driver_notices(drivers):
    arguments, (begin, end) = CASES["decode, key range"]
    command = [drivers / "hidden_memory", *map(str, [*arguments, begin + 64, end])]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
