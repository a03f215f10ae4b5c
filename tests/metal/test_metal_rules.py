"""The Metal kernels pass the core's own tests.

Each test runs three times. Each time, it uses one kernel for few queries, another for many, and another schedule.
"""

import functools

import mlx.core as mx
import pytest

from tests.kernel_rules import rules, run_through
from tests.metal.metal_attention import flash_attention

pytestmark = pytest.mark.rotate(72)  # 3,500 cases, most of which differ only in the kernels


def fast_and_tg(query: mx.array, dim: int, quantised: bool = False) -> str:
    if quantised:  # metal_prefill_tg takes no quantised keys
        return parallel_and_reg(query, dim).replace("parallel", "fast")
    return "metal_decode_fast" if query.shape[-2] <= 1 else "metal_prefill_tg" if dim <= 256 else "metal_rowwise"


def parallel_and_reg(query: mx.array, dim: int, quantised: bool = False) -> str:
    return "metal_decode_parallel" if query.shape[-2] <= 1 else "metal_prefill_reg" if dim <= 256 else "metal_rowwise"


def split_and_rowwise(query: mx.array, dim: int, quantised: bool = False) -> str:
    return "metal_decode_split" if query.shape[-2] <= 8 else "metal_rowwise"


TEAMS = {fast_and_tg: "reverse", parallel_and_reg: "greedy", split_and_rowwise: "random:3"}


@pytest.fixture(autouse=True, params=TEAMS, ids=lambda team: team.__name__)
def through_metal(request, monkeypatch):
    on_metal = functools.partial(flash_attention, schedule=TEAMS[request.param])
    run_through(monkeypatch, on_metal, on_metal, request.param)


# This test takes too long in the emulator. test_quantised_kernels.py has a shorter one.
globals().update(rules("test_equals_the_dequantised"))
