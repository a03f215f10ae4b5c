"""The rules that every backend keeps: the core's own tests, run through the CUDA kernels on the CPU.

Each kernel meets each rule, with the lengths that it is for, in a schedule of its own.
"""

import functools

import pytest
from cuda_attention import flash_attention
from kernel_rules import assert_same_but_for_tensor_cores, rules, run_through

pytestmark = pytest.mark.rotate(72)


def decode(query, dim: int, quantised: bool) -> str:
    return "cuda_decode" if query.shape[-2] <= 16 else prefill(query, dim, quantised)


def prefill(query, dim: int, quantised: bool) -> str:
    return "cuda_prefill" if dim <= 256 and not quantised else "cuda_rowwise"


def rowwise(query, dim: int, quantised: bool) -> str:
    return "cuda_rowwise"


TEAMS = {decode: "greedy", prefill: "reverse", rowwise: "random:3"}


@pytest.fixture(autouse=True, params=TEAMS, ids=lambda team: team.__name__)
def through_cuda(request, monkeypatch):
    on_cpu = functools.partial(flash_attention, schedule=TEAMS[request.param])

    def kernel_for(query, dim, quantised=False):
        return request.param(query, dim, quantised)

    run_through(monkeypatch, on_cpu, on_cpu, kernel_for, assert_same_but_for_tensor_cores)


globals().update(rules())
