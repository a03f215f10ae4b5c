"""While a launch still reads scratch memory, the next call does not overwrite this memory.

Successive calls use the same scratch memory. MLX makes a launch wait for the launch that last wrote an array, but not
for launches that read it. So each launch declares all scratch memory as outputs, even memory that it only reads.
"""

from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core.masks import SlidingWindow

from tests import launches
from tests.core.gradient_oracle import draw_call
from tests.gpu_calls import described
from tests.metal import metal_backward
from tests.metal.test_metal_scratch import chunks_within_bound
from tests.promises import promise


def gradient(rng, dtype, mask="causal", length=70):
    call = draw_call(rng, heads=4, kv_heads=2, length=length, key_len=90, dim=64, dtype=dtype)
    return metal_backward.described(replace(call, mask=mask), device="cuda")


def assert_ordered(found, scratch):
    assert {name for launch in found for name in launch["scratch"]} == scratch
    for launch in found:
        assert scratch & launch["buffers"].keys() <= set(launch["outputs"])


@promise("on CUDA no call overwrites shared scratch that another still reads")
def test_of_forward_passes():
    assert_ordered(described("cuda_decode", length=1, keys=3000), {"partials", "arrivals"})
    in_parts = described("cuda_prefill_hopper", dtype=mx.float32, keys=3000)
    assert_ordered(in_parts, {"key_parts", "value_parts"})


# Batch, heads, key/value heads, queries, keys, head_dim. With the last shape, all keys are in one chunk.
@pytest.mark.parametrize("shape", [(1, 28, 4, 8, 131_072, 128), (8, 128, 1, 4, 8192, 512), (8, 128, 1, 16, 8192, 512)])
def test_of_decode_steps(shape):
    chunks_within_bound("cuda_decode", shape)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_gradients(rng, dtype, capability):
    is_in_parts = (dtype, capability) == ("float32", 90)
    parts = {"query_parts", "key_parts", "value_parts", "dout_parts"} if is_in_parts else set()
    with launches.shared_memory(227, capability):
        found = gradient(rng, dtype)
        assert len([launch for launch in found if "saved_rows" in launch["buffers"]]) == 3
        assert_ordered(found, {"saved_rows", "dk_parts", "dv_parts"} | parts)
        assert_ordered(gradient(rng, dtype, SlidingWindow(20)), {"saved_rows"} | parts)


# with_next[i]: whether launch i + 1 may start before launch i ends. The four launches compute, in this order:
# delta; partial dk and dv; dq; merged dk and dv. Calls without queries have only the second and the last.
@pytest.mark.parametrize(("length", "with_next"), [(70, [False, True, False, False]), (0, [False, False])])
@pytest.mark.parametrize("capability", [80, 90])
def test_which_launch_runs_beside_the_next(rng, capability, length, with_next):
    with launches.shared_memory(227, capability):
        assert [launch["with_next"] for launch in gradient(rng, "bfloat16", length=length)] == with_next
