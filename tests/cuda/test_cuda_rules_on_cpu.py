"""Runs tests of tests/core with CUDA kernels on the CPU, once with each entry of TEAMS."""

import functools
import math

import mlx.core as mx
import numpy as np
import pytest

from tests import launches
from tests.core.oracle import assert_matches_reference, draw
from tests.cuda.cuda_attention import flash_attention
from tests.kernel_rules import assert_same_but_for_tensor_cores, rules, run_through

pytestmark = [pytest.mark.rotate(144, nightly=12), pytest.mark.usefixtures("requires_clang")]  # 4,700 cases


def prefill(query: mx.array, dim: int, quantised: bool = False) -> str:
    return "cuda_prefill" if dim <= 256 and not quantised else "cuda_rowwise"


def decode(query: mx.array, dim: int, quantised: bool = False) -> str:
    return "cuda_decode" if query.shape[-2] <= 16 else prefill(query, dim, quantised)


def hopper(query: mx.array, dim: int, quantised: bool = False) -> str:
    if dim > 256 or quantised:
        return "cuda_rowwise"
    return "cuda_prefill" if query.dtype == mx.float32 and dim > 128 else "cuda_prefill_hopper"


def rowwise(query: mx.array, dim: int, quantised: bool = False) -> str:
    return "cuda_rowwise"


TEAMS = {  # name -> the function that chooses a kernel, the schedule of threads, KiB of shared memory per block
    "decode": (decode, "greedy", 227),
    "prefill": (hopper, "reverse", 227),
    "rowwise": (rowwise, "random:3", 227),
    "other_gpus": (decode, "random:5", 99),
}


@pytest.fixture(autouse=True, params=TEAMS)
def through_cuda(request, monkeypatch):
    kernel_for, schedule, kilobytes = TEAMS[request.param]
    on_cpu = functools.partial(flash_attention, schedule=schedule)
    run_through(monkeypatch, on_cpu, on_cpu, kernel_for, assert_same_but_for_tensor_cores)
    with launches.shared_memory(kilobytes):
        yield


globals().update(
    rules(
        "test_equals_the_dequantised",  # takes too long on the CPU; test_quantised_on_cpu.py has a shorter one
        "test_gradients_of_views_that_begin_in_the_middle_of_an_element",  # test_backward_on_cpu.py tests gradients
    )
)


def test_large_and_small_numbers_in_parts(rng):
    """The kernel splits float32 numbers into 16-bit parts.

    Results must be right for very small numbers, and for numbers so large that their first part is infinite.
    """
    query, key, value = draw(rng, heads=2, length=70, key_len=90, dim=40)
    value[:, :, 7] = 3.4e38
    key[:, :, 11] *= 1e-30
    query[:, :, 5] *= 1e-30
    assert_matches_reference(query, key, value, mask="causal", kernel="cuda_prefill_hopper", attention=flash_attention)


@pytest.mark.parametrize("kernel", ["cuda_decode", "cuda_prefill", "cuda_prefill_hopper"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_many_keys_of_little_weight(kernel, dtype):
    """One key has nearly all weight, and value 0. So `out` is a sum of values with weights too small for float16."""
    length, key_len, dim, weight = (1 if kernel == "cuda_decode" else 17), 2048, 32, 2.0**-25.5
    query = mx.ones((1, 1, length, dim)).astype(dtype)
    key = mx.where(mx.arange(key_len)[:, None] == 0, 1, 0) * mx.ones((1, 1, key_len, dim))
    value = mx.where(mx.arange(key_len)[:, None] == 0, 0, 1) * mx.ones((1, 1, key_len, dim))
    scale = -math.log(weight) / dim
    out = flash_attention(query, key.astype(dtype), value.astype(dtype), scale, kernel=kernel)
    rest = (key_len - 1) * weight
    assert np.abs(np.array(mx.array(out).astype(mx.float32)) - rest / (1 + rest)).max() < 1e-6
