"""On Hopper blocks of keys add to dq in one order, so the gradient has the same bits whichever blocks start first."""

from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core.masks import SlidingWindow

from tests import launches
from tests.core.gradient_oracle import draw_call
from tests.cuda.cuda_attention import run_backward

pytestmark = [pytest.mark.rotate(3), pytest.mark.usefixtures("requires_clang")]
GROUPS = "backward.block_groups"  # how many groups of heads are computed at a time


@pytest.mark.parametrize("mask", ["causal", SlidingWindow(90)], ids=["causal", "window"])
@pytest.mark.parametrize(("dim", "precision"), [(40, "input"), (128, "input"), (128, "float32")])
def test_which_blocks_start_first(rng, dim, precision, mask):
    call = draw_call(rng, heads=4, kv_heads=2, length=150, key_len=300, dim=dim, dtype="bfloat16")
    call = replace(call, mask=mask)

    def gradients(groups, schedule):
        edit = lambda source: source.replace(GROUPS, groups)  # noqa: E731
        with launches.shared_memory(227, 90):
            result = run_backward(call, precision=precision, schedule=schedule, edit=edit)
        assert "backward_hopper" in result.counts
        return result.dq, result.dk, result.dv

    first = gradients(GROUPS, "forward")
    for groups, schedule in (("1u", "random:1"), ("3u", "reverse")):
        assert all(map(mx.array_equal, gradients(groups, schedule), first))
