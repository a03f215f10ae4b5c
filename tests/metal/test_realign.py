"""A kernel copies arrays that begin in the middle of an element to aligned memory."""

import launches
import mlx.core as mx
import numpy as np
import pytest
from cuda_attention import on_cpu
from metal_attention import execute, on_metal
from metal_on_cpu import Undefined
from planted_faults import Fault, assert_is_noticed
from test_strides import cache_slice, column_major, reversed_rows, strided_columns, transposed

SHAPES = [(1, 1, 1, 1), (1, 1, 5, 51), (1, 2, 16, 8), (1, 1, 257, 1), (2, 3, 7, 13)]  # around a threadgroup's 256

PREPARED = {"metal": on_metal, "cuda": on_cpu}


def copied(device, array, start, edit=lambda source: source):
    """The kernel's copy from a buffer in which the array begins at byte `start`. The harness raises if the kernel
    accesses memory outside of the array or of the copy, or leaves an element of the copy unwritten."""
    mx.eval(array)
    (launch,) = launches.realign(array, device)
    memory, offset = launch["buffers"]["misaligned"]
    launch["buffers"]["misaligned"] = b"\xff" * start + memory, start + offset
    written = {"realigned": Undefined(array.shape, np.asarray(array).dtype)}
    execute([launch], written, "forward", edit, PREPARED[device])
    return written["realigned"]


@pytest.mark.parametrize("device", PREPARED)
@pytest.mark.parametrize("layout", [mx.array, transposed, cache_slice, strided_columns, reversed_rows, column_major])
@pytest.mark.parametrize("dtype", [mx.uint8, mx.float16, mx.float32], ids=str)
def test_copies_each_element(rng, dtype, layout, device):
    for start, shape in enumerate(SHAPES, start=1):
        array = layout(mx.array(rng.integers(0, 256, shape)).astype(dtype))
        np.testing.assert_array_equal(copied(device, array, start), np.asarray(array))


@pytest.mark.parametrize("device", PREPARED)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("element >= params.count", "element > params.count"), ("offset * SIZE + i", "offset * SIZE")],
)
def test_is_noticed(right, wrong, device):
    """The first fault writes beyond the copy; the second repeats the first byte of an element."""
    array = mx.arange(1, 6, dtype=mx.float32)
    fault = Fault(f"{device}_realign", right, wrong)

    def call(edit):
        np.testing.assert_array_equal(copied(device, array, 1, edit), np.asarray(array))

    assert_is_noticed(fault, call)
