"""Forward and backward take memory linear in L, with no array beyond those of the account in docs/training.md."""

import pytest
from backward_memory import Call, peak_extra


def check(call):
    extra, scratch = peak_extra(call)
    # The threads' scratch, and memory that is the process's own.
    slack = 0.01 * call.needed + 1.5e6 + scratch
    assert 0.95 * call.needed <= extra <= call.needed + slack
    if call.length >= 8192:  # where what is the same for all lengths does not count
        assert extra - scratch < 1.2 * call.held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [4096, 8192, pytest.param(32768, marks=pytest.mark.long("a minute"))])
def test_causal(length, dtype):
    # At 8k one array of all scores would take 268 MB, at 32k 4.3 GB.
    check(Call(length, heads=1, kv_heads=1, dtype=dtype))


@pytest.mark.parametrize("mask", ["window", "keys"])
@pytest.mark.parametrize("length", [2047, 8191])
def test_masks(length, mask):
    check(Call(length, heads=2, kv_heads=2, dtype="float32", mask=mask))


def test_many_query_heads_of_one_key_head():
    """The gradient of query is most of what is held, and its sum in float32 would be twice that."""
    check(Call(8192, heads=7, kv_heads=1, dtype="bfloat16", mask="window"))
