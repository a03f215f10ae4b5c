"""Scratch is kept for the next call. MLX orders a launch after the last writer of an array, not after its readers.

So MLX is told that launches write scratch even if they only read it: the next call waits for them.
"""

from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core.arguments import lowered
from flashattn_core.masks import SlidingWindow

from tests import launches
from tests.core.gradient_oracle import draw_call
from tests.metal import metal_backward


def forward(dtype, length, kernel):
    query, key = mx.zeros((1, 4, length, 64), dtype), mx.zeros((1, 2, 3000, 64), dtype)
    kernel, precision, gpu = launches.form(kernel)
    with gpu:
        return launches.forward(lowered(query, key, key, None, "causal", kernel=kernel, **precision), "cuda")


def gradient(rng, dtype, mask, length=70):
    call = draw_call(rng, heads=4, kv_heads=2, length=length, key_len=90, dim=64, dtype=dtype)
    return metal_backward.described(replace(call, mask=mask), device="cuda")


def assert_ordered(described, scratch):
    assert {name for launch in described for name in launch["scratch"]} == scratch
    for launch in described:
        assert scratch & launch["buffers"].keys() <= set(launch["outputs"])


def test_of_forward_passes():
    assert_ordered(forward(mx.bfloat16, 1, "cuda_decode"), {"partials", "arrivals"})
    assert_ordered(forward(mx.float32, 100, "cuda_prefill_hopper"), {"key_parts", "value_parts"})


@pytest.mark.parametrize(
    ("shape", "bound"),  # batch, heads, key/value heads, queries, keys, head_dim
    [
        ((1, 28, 4, 8, 131_072, 128), 16 << 20),
        ((8, 128, 1, 4, 8192, 512), 16 << 20),
        ((8, 128, 1, 16, 8192, 512), 8 * 128 * 16 * 514 * 4),  # one chunk
    ],
)
def test_of_decode_steps(shape, bound):
    batch, heads, kv_heads, length, keys, dim = shape
    row = mx.zeros((1, 1, 1, 1), mx.bfloat16)  # broadcast: takes no memory
    query, key = mx.broadcast_to(row, (batch, heads, length, dim)), mx.broadcast_to(row, (batch, kv_heads, keys, dim))
    (launch,) = launches.forward(lowered(query, key, key, kernel="cuda_decode"), "cuda")
    assert launch["buffers"]["partials"] <= bound


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_gradients(rng, dtype, capability):
    parts = (
        {"query_parts", "key_parts", "value_parts", "dout_parts"} if (dtype, capability) == ("float32", 90) else set()
    )
    with launches.shared_memory(227, capability):
        described = gradient(rng, dtype, "causal")
        assert len([launch for launch in described if "saved_rows" in launch["buffers"]]) == 3
        assert_ordered(described, {"saved_rows", "dk_parts", "dv_parts"} | parts)
        assert_ordered(gradient(rng, dtype, SlidingWindow(20)), {"saved_rows"} | parts)


@pytest.mark.parametrize("capability", [80, 90])
def test_dq_runs_beside_dk_and_dv(rng, capability):
    with launches.shared_memory(227, capability):
        delta, dk_and_dv, dq, merge = gradient(rng, "bfloat16", "causal")
    assert [launch["with_next"] for launch in (delta, dk_and_dv, dq, merge)] == [False, True, False, False]


@pytest.mark.parametrize("capability", [80, 90])
def test_merging_waits_where_there_is_no_query(rng, capability):
    with launches.shared_memory(227, capability):
        dk_and_dv, merge = gradient(rng, "bfloat16", "causal", length=0)
    assert [dk_and_dv["with_next"], merge["with_next"]] == [False, False]
