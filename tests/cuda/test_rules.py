"""The rules that every backend keeps: the core's own tests, run through the CUDA kernels, each with all lengths."""

import flashattn_core
import mlx.core as mx
import pytest
from kernel_rules import assert_same_but_for_tensor_cores, rules, run_through

pytestmark = pytest.mark.usefixtures("requires_gpu")


def decode_and_prefill(query: mx.array, dim: int, quantised: bool) -> str:
    if query.shape[-2] <= 16:
        return "cuda_decode"
    return "cuda_prefill" if dim <= 256 and not quantised else "cuda_rowwise"


def prefill(query: mx.array, dim: int, quantised: bool) -> str:
    return "cuda_prefill" if dim <= 256 and not quantised else "cuda_rowwise"


def prefill_hopper(query: mx.array, dim: int, quantised: bool) -> str:
    if mx.device_info(mx.gpu)["compute_capability_major"] != 9:
        pytest.skip("compute capability 9.0")
    if query.dtype == mx.float32 and dim > 128:
        pytest.skip("float32 up to head_dim 128")
    return "cuda_prefill_hopper" if dim <= 256 and not quantised else "cuda_rowwise"


def rowwise(query: mx.array, dim: int, quantised: bool) -> str:
    return "cuda_rowwise"


@pytest.fixture(autouse=True, params=[decode_and_prefill, prefill, prefill_hopper, rowwise], ids=lambda f: f.__name__)
def through_cuda(request, monkeypatch):
    functions = flashattn_core.flash_attention, flashattn_core.quantized_flash_attention

    def kernel_for(query, dim, quantised=False):
        return request.param(query, dim, quantised)

    run_through(monkeypatch, *functions, kernel_for, assert_same_but_for_tensor_cores)


globals().update(rules())
