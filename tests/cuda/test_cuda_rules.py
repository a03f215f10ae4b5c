"""On a GPU, each CUDA kernel passes tests of tests/core, with all lengths."""

import flashattn_core
import mlx.core as mx
import pytest

from tests.cuda.test_cuda_rules_on_cpu import decode, prefill, rowwise
from tests.kernel_rules import assert_same_but_for_tensor_cores, rules, run_through

pytestmark = pytest.mark.usefixtures("requires_gpu")


def prefill_elsewhere(query: mx.array, dim: int, quantised: bool = False) -> str:
    """Like prefill(), but on Hopper only. There unreadable() makes cuda_prefill run its version for other GPUs."""
    if mx.device_info(mx.gpu)["compute_capability_major"] != 9:
        pytest.skip("compute capability 9.0: elsewhere it is the only form")
    if query.dtype == mx.float32:
        pytest.skip("float32 is copied for Hopper's form, whatever its strides are")
    return prefill(query, dim, quantised)


def in_reverse(x):
    """Stores the rows in reverse order, which the tensor memory accelerator (TMA) cannot read."""
    return mx.contiguous(x[..., ::-1, :])[..., ::-1, :]


def unreadable(attention):
    """Makes `attention` store the keys in reverse order. On Hopper, another version of the kernel then runs."""

    def attend(query, key, *args, **options):
        if isinstance(key, mx.array) and key.ndim >= 3 and key.size:
            key = in_reverse(key)
        return attention(query, key, *args, **options)

    return attend


@pytest.fixture(autouse=True, params=[decode, prefill, prefill_elsewhere, rowwise], ids=lambda f: f.__name__)
def through_cuda(request, monkeypatch):
    plain, quantised = flashattn_core.flash_attention, flashattn_core.quantized_flash_attention
    plain = unreadable(plain) if request.param is prefill_elsewhere else plain
    run_through(monkeypatch, plain, quantised, request.param, assert_same_but_for_tensor_cores)


globals().update(rules())
