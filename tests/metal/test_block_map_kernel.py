"""Metal's and CUDA's kernels compute a mask's block map as csrc/call/block_map.h defines it."""

import mlx.core as mx
import numpy as np
import pytest

from tests import launches
from tests.core.array_cases import drawn, expected_map
from tests.core.oracle import DTYPES as FLOATS
from tests.emulators.metal_on_cpu import Undefined
from tests.metal.metal_attention import execute
from tests.metal.planted_faults import Fault, assert_is_noticed

DEVICES = ["metal", "cuda"]
DTYPES = {"bool": mx.bool_, **FLOATS}
SHAPES = [(1, 1), (33, 31), (64, 96), (2, 3, 40, 64), (100, 333)]  # with and without incomplete blocks


def found(device, mask, edit=lambda source: source):
    """The kernel's block map. The emulator raises if the kernel exceeds the bounds of mask or map, or skips a block."""
    (launch,) = launches.block_map(mask, device)
    shape = (*mask.shape[:-2], *(-(-n // 32) for n in mask.shape[-2:]))
    written = {"found_blocks": Undefined(shape, np.dtype(np.uint8))}
    execute([launch], written, "forward", edit, device)
    return written["found_blocks"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_it_says(rng, dtype, device):
    for shape in SHAPES:
        mask = drawn(rng, shape, DTYPES[dtype])
        np.testing.assert_array_equal(found(device, mask), expected_map(mask))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bool", "bfloat16"])
def test_of_views(rng, dtype, device):
    """The map must be right for rows that cannot be read in whole 32-bit words, and for rows read backwards."""
    whole = drawn(rng, (64, 130), DTYPES[dtype])
    for view in (whole[:, 1:97], whole[::-1, ::-1], whole[::2, :128], whole.T):
        np.testing.assert_array_equal(found(device, view), expected_map(view))


@pytest.mark.parametrize(
    ("device", "right", "wrong", "dtype"),
    [
        ("cuda", "words[i] != 0", "words[i] == 0x01010101", "bool"),
        ("cuda", "& ~words[i] & 0x80808080", "& ~words[i] & 0x80", "bool"),
        ("cuda", "bits & 0x7fff", "bits", "bfloat16"),
        ("cuda", "lane < block.rows", "true", "bool"),
        ("metal", "bias != 0", "bias == -INFINITY", "float16"),
        ("metal", "r < block.rows", "true", "bool"),
    ],
)
def test_is_noticed(rng, device, right, wrong, dtype):
    masks = [drawn(rng, shape, DTYPES[dtype]) for shape in ((64, 96), (40, 64))]
    one = mx.arange(32 * 32).reshape(32, 32) == 101
    masks += [one, ~one] if dtype == "bool" else [mx.where(one, -0.0, 0.0).astype(DTYPES[dtype])]

    def call(edit):
        for mask in masks:
            np.testing.assert_array_equal(found(device, mask, edit), expected_map(mask))

    assert_is_noticed(Fault(f"{device}_block_map", right, wrong), call)
