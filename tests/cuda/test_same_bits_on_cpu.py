"""A result has the same bits whatever the order of threads is, and whichever outputs are saved beside it."""

import mlx.core as mx
import pytest

from tests.core.oracle import draw
from tests.cuda.cuda_attention import flash_attention, run
from tests.metal.test_metal_kernels import SCHEDULES, assert_exact_out
from tests.promises import promise

pytestmark = [pytest.mark.rotate(3), pytest.mark.usefixtures("requires_clang")]
CASES = {  # kernel, queries, keys, bits; optionally a dtype other than bfloat16
    "a chunk": ("cuda_decode", 3, 100, None),
    "chunks": ("cuda_decode", 1, 300, None),
    "quantised": ("cuda_decode", 2, 300, 4),
    "quantised, tensor cores": ("cuda_prefill", 40, 70, 8),
    "tensor cores": ("cuda_prefill", 40, 70, None),
    "warpgroups": ("cuda_prefill_hopper", 140, 150, None),
    "warpgroups, float32": ("cuda_prefill_hopper", 140, 150, None, "float32"),
    "threads": ("cuda_rowwise", 40, 70, None),
}


@pytest.fixture(params=CASES)
def case(rng, request):
    kernel, length, key_len, bits, *dtype = CASES[request.param]
    dtype = dtype[0] if dtype else "bfloat16"
    query, *stored = draw(rng, heads=4, kv_heads=1, length=length, key_len=key_len, dim=64, dtype=dtype)
    arrays = query, *(stored if bits is None else [mx.quantize(x, bits=bits) for x in stored])
    return arrays, {"mask": "causal", "kernel": kernel, "bits": bits}


@promise("on CUDA every schedule gives the same bits")
def test_the_schedule(case):
    arrays, options = case
    first = run(*arrays, **options)
    for schedule in SCHEDULES[1:]:
        other = run(*arrays, **options, schedule=schedule)
        assert mx.array_equal(first.out, other.out)
        assert mx.array_equal(first.lse, other.lse)


def test_a_call_that_nobody_asks_for_lse_of(case):
    arrays, options = case
    out, _ = flash_attention(*arrays, **options, return_lse=True)
    assert mx.array_equal(flash_attention(*arrays, **options), out)


EXACT_OUT = {  # kernel, queries, keys, dtype, head_dim, value_dim
    "a chunk": ("cuda_decode", 3, 100, "float16", 64, 64),
    "chunks": ("cuda_decode", 2, 300, "bfloat16", 64, 40),
    "chunks, a large head": ("cuda_decode", 1, 300, "bfloat16", 320, 64),
    "tensor cores": ("cuda_prefill", 40, 70, "float16", 64, 64),
    "tensor cores, padded columns": ("cuda_prefill", 40, 70, "bfloat16", 64, 39),
    "warpgroups": ("cuda_prefill_hopper", 140, 150, "bfloat16", 64, 64),
    "warpgroups that share keys": ("cuda_prefill_hopper", 20, 2100, "float16", 64, 64),
    "threads": ("cuda_rowwise", 40, 70, "bfloat16", 64, 40),
}


@pytest.mark.parametrize("name", EXACT_OUT)
def test_a_call_whose_gradient_may_be_asked_for(rng, name):
    assert_exact_out(rng, run, *EXACT_OUT[name])


def test_exact_out_changes_no_bit(case):
    arrays, options = case
    if options["bits"] is None and arrays[0].dtype != mx.float32:  # other calls have no exact_out
        assert mx.array_equal(run(*arrays, **options, exact_out=True).out, run(*arrays, **options).out)
