"""A block of threads keeps a list of the tiles that a mask's block map does not hide. The list is in shared memory.

The size of a kernel's shared memory is fixed when the kernel is loaded. So the list's size must not depend on lengths.
"""

from dataclasses import replace

import mlx.core as mx
import pytest

from tests import launches
from tests.core.gradient_oracle import draw_call
from tests.gpu_calls import described
from tests.metal import metal_backward

LIST_BYTES = 8 * 1024


def forward(keys, dtype=mx.bfloat16, capability=90):
    """Returns the launch that uses the most shared memory. This launch computes attention."""
    with launches.shared_memory(227, capability):
        found = described("cuda_prefill", heads=2, keys=keys, dtype=dtype, mask=mx.ones((1, keys), mx.bool_))
    return max(found, key=lambda launch: launch["dynamic_shared"])


def has_map(launch):
    return launch["constants"]["has_block_map"]


@pytest.mark.parametrize("capability", [0, 90])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_the_room_is_the_same_for_all_lengths(dtype, capability):
    short, long = (forward(keys, dtype, capability) for keys in (300, 20_000))
    assert has_map(short)
    assert has_map(long)
    assert short["function"] == long["function"]
    assert short["dynamic_shared"] == long["dynamic_shared"]


def test_a_list_that_is_too_long_leaves_out_the_map():
    launch = forward(140_000)
    assert not has_map(launch)
    assert launch["dynamic_shared"] == forward(300)["dynamic_shared"] - LIST_BYTES


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_fits(rng, dtype):
    call = draw_call(rng, heads=4, length=300, key_len=300, dim=128, dtype=dtype)
    for mask in (mx.ones((300, 300), mx.bool_), mx.ones((4, 300, 300), mx.bool_)):  # one mask; one mask per head
        with launches.shared_memory(227, 90):
            found = metal_backward.described(replace(call, mask=mask), device="cuda")
        assert any(has_map(launch) for launch in found)
        assert all(launch["dynamic_shared"] <= 227 * 1024 for launch in found)
