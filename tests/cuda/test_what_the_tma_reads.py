"""cuda_prefill has a version for Hopper, which runs if the tensor memory accelerator (TMA) can read the arrays."""

import mlx.core as mx
import pytest
from flashattn_core.arguments import lowered

from tests import launches

ROWS, COLUMNS = 40, 64
HEAD = ROWS * COLUMNS
# Strides of heads, rows and columns, the offset of the first element, and whether the TMA can read such a 16-bit array.
LAYOUTS = {
    "contiguous": (HEAD, COLUMNS, 1, 0, True),
    "heads between rows": (COLUMNS, 2 * COLUMNS, 1, 0, True),
    "rows further apart": (ROWS * 72, 72, 1, 0, True),
    "from 16 bytes on": (HEAD, COLUMNS, 1, 8, True),
    "from 2 bytes on": (HEAD, COLUMNS, 1, 1, False),
    "rows of no whole 16 bytes": (ROWS * 68, 68, 1, 0, False),
    "rows that overlap": (HEAD, 8, 1, 0, False),
    "one row for all": (COLUMNS, 0, 1, 0, False),
    "rows in reverse": (HEAD, -COLUMNS, 1, HEAD - COLUMNS, False),
    "one head for all": (0, COLUMNS, 1, 0, False),
    "columns apart": (2 * HEAD, 2 * COLUMNS, 2, 0, False),
}


def array(layout="contiguous", dtype=mx.bfloat16):
    *strides, offset, _ = LAYOUTS[layout]
    return mx.as_strided(mx.zeros(8 * HEAD, dtype), (1, 2, ROWS, COLUMNS), (0, *strides), offset)


@pytest.fixture(autouse=True)
def on_hopper():
    with launches.shared_memory(227, 90):
        yield


def is_hoppers(query, key, value, precision="float32"):
    (launch,) = launches.forward(lowered(query, key, value, kernel="cuda_prefill", precision=precision), "cuda")
    is_form = launch["function"].startswith("cuda_prefill_hopper_")
    assert is_form == (launch["tensor_maps"] != [])
    return is_form


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("precision", ["float32", "input"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_of_the_three(layout, precision, which):
    given = dict.fromkeys(("query", "key", "value"), array()) | {which: array(layout)}
    assert is_hoppers(**given, precision=precision) == LAYOUTS[layout][-1]
    with launches.shared_memory(227, 100):
        assert not is_hoppers(**given, precision=precision)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_is_copied_from_anywhere(layout):
    call = lowered(*[array(layout, mx.float32)] * 3, kernel="cuda_prefill")
    assert [launch["tensor_maps"] for launch in launches.forward(call, "cuda")] == [[], ["key_parts", "value_parts"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_keys_are_copied(layout):
    stored = mx.quantize(array(), bits=4)
    call = lowered(array(layout), stored, stored, bits=4, group_size=64, kernel="cuda_prefill")
    maps = ["key_parts", "value_parts", "query"] if LAYOUTS[layout][-1] else []
    assert [launch["tensor_maps"] for launch in launches.forward(call, "cuda")] == [[], maps]


BY_OTHERS = {
    "float32 of large heads": ((1, 2, ROWS, 136), ROWS, mx.float32),
    # The driver refuses tensor maps of empty arrays, and launches that would copy no rows.
    "no keys": ((1, 1, ROWS, COLUMNS), 0, mx.bfloat16),
    "no keys, float32": ((1, 1, ROWS, COLUMNS), 0, mx.float32),
    "batches of two dimensions": ((2, 3, 2, ROWS, COLUMNS), ROWS, mx.bfloat16),
}


@pytest.mark.parametrize("name", BY_OTHERS)
def test_calls_that_are_no_hoppers(name):
    shape, keys, dtype = BY_OTHERS[name]
    query, key = mx.zeros(shape, dtype), mx.zeros((*shape[:-2], keys, shape[-1]), dtype)
    assert not is_hoppers(query, key, key)


def test_16_bit_numbers_of_large_heads_are_hoppers():
    assert is_hoppers(*[mx.zeros((1, 2, ROWS, 136), mx.bfloat16)] * 3)
