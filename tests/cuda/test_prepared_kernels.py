"""What a call runs is compiled when its graph is built, and asked for once."""

import launches
import mlx.core as mx
import pytest
from flashattn_core.arguments import lowered
from flashattn_core.masks import SlidingWindow


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "never")


def wanted(length=40, key_len=50, dim=64, dtype=mx.bfloat16, mask="causal", refuses=False):
    query, key = (mx.zeros((1, heads, rows, dim), dtype) for heads, rows in ((4, length), (2, key_len)))
    return launches.prepared(lowered(query, key, key, None, mask), refuses=refuses)[0]


def test_a_refusal_is_an_error_while_there_is_a_choice():
    for _ in range(2):  # what is refused is not taken for prepared
        with pytest.raises(ValueError, match="the driver's own words"):
            wanted(dim=72, refuses=True)


CHANGES = [
    {"length": 41},
    {"length": 1},
    {"dim": 80},
    {"dtype": mx.float32},
    {"mask": None},
    {"mask": SlidingWindow(9)},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_call_of_another_kind_asks_again(change):
    wanted()
    assert len(wanted(**change)) == 1


def test_a_step_with_more_keys_asks_for_nothing():
    wanted(length=1, key_len=50)
    assert wanted(length=1, key_len=51) == []


@pytest.mark.parametrize("length", [0, 40])
def test_a_call_without_queries_asks_for_nothing(length):
    assert bool(wanted(length=length, dim=96)) == (length > 0)
