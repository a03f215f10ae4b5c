"""cuda_prefill has a version for Hopper, which runs if the tensor memory accelerator (TMA) can read the arrays."""

import mlx.core as mx
import pytest
from flashattn_core.arguments import lowered

from tests import launches

ROWS, COLUMNS = 40, 64


def array(heads, columns=COLUMNS, dtype=mx.bfloat16):
    return mx.zeros((1, heads, ROWS, columns), dtype)


def layouts(dtype):
    """Layouts that the TMA can read, and layouts that it cannot, for 16-bit numbers."""

    def view(strides, offset=0, heads=2):
        """An array with these strides of heads and rows that begins at element `offset`."""
        memory = mx.zeros(ROWS * 4 * COLUMNS * heads, dtype)
        return mx.as_strided(memory, (1, heads, ROWS, COLUMNS), (0, *strides, 1), offset)

    read = {
        "contiguous": array(2, dtype=dtype),
        "heads between rows": view((COLUMNS, 2 * COLUMNS)),
        "rows further apart": view((ROWS * 72, 72)),
        "from 16 bytes on": view((ROWS * COLUMNS, COLUMNS), offset=8),
    }
    not_read = {
        "from 2 bytes on": view((ROWS * COLUMNS, COLUMNS), offset=1),
        "rows of no whole 16 bytes": view((ROWS * 68, 68)),
        "rows that overlap": view((ROWS * COLUMNS, 8)),
        "one row for all": view((COLUMNS, 0)),
        "rows in reverse": view((ROWS * COLUMNS, -COLUMNS), offset=(ROWS - 1) * COLUMNS),
        "one head for all": view((0, COLUMNS)),
        "columns apart": array(2, 2 * COLUMNS, dtype)[..., ::2],
    }
    return read, not_read


READ, NOT_READ = layouts(mx.bfloat16)


@pytest.fixture(autouse=True)
def on_hopper():
    with launches.shared_memory(227, 90):
        yield


def is_hoppers(query, key, value, precision="float32"):
    (launch,) = launches.forward(lowered(query, key, value, kernel="cuda_prefill", precision=precision), "cuda")
    assert launch["kernel"] == "cuda_prefill"
    is_form = launch["function"].startswith("cuda_prefill_hopper_")
    assert is_form == (launch["boxes"] != [])
    return is_form


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("precision", ["float32", "input"])
@pytest.mark.parametrize("how", [*READ, *NOT_READ])
def test_one_of_the_three(how, precision, which):
    given = {"query": array(2), "key": array(2), "value": array(2)} | {which: (READ | NOT_READ)[how]}
    assert is_hoppers(**given, precision=precision) == (how in READ)
    with launches.shared_memory(227, 100):
        assert not is_hoppers(**given, precision=precision)


@pytest.mark.parametrize("how", [*READ, *NOT_READ])
def test_float32_is_copied_from_anywhere(how):
    read, not_read = layouts(mx.float32)
    given = [(read | not_read)[how]] * 3
    described = launches.forward(lowered(*given, kernel="cuda_prefill"), "cuda")
    assert [launch["boxes"] for launch in described] == [[], ["key_parts", "value_parts"]]


def test_float32_of_large_heads_is_no_hoppers():
    wide = [array(2, 136, mx.float32)] * 3
    assert not is_hoppers(*wide)
    assert is_hoppers(*(x.astype(mx.bfloat16) for x in wide))


def test_quantised_keys_are_no_hoppers():
    stored = mx.quantize(array(2), bits=4)
    call = lowered(array(2), stored, stored, bits=4, group_size=64, kernel="cuda_prefill")
    assert [launch["boxes"] for launch in launches.forward(call, "cuda")] == [[]]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_arrays_without_rows_are_none_of_its_boxes(dtype):
    """The driver refuses a tensor map of an empty array, and a launch that copies no rows."""
    query, none = mx.zeros((1, 1, ROWS, COLUMNS), dtype), mx.zeros((1, 1, 0, COLUMNS), dtype)
    assert not is_hoppers(query, none, none)


def test_batches_of_two_dimensions_are_none_of_its_boxes():
    many = mx.zeros((2, 3, 2, ROWS, COLUMNS), mx.bfloat16)
    assert not is_hoppers(many, many, many)
