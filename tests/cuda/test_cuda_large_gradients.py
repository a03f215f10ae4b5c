"""CUDA's kernels for gradients, run on the CPU, pass the tests of test_metal_large_gradients.py."""

import functools

import mlx.core as mx
import pytest

from tests import launches
from tests.core.gradient_oracle import Call
from tests.cuda import cuda_attention
from tests.metal import test_metal_large_gradients as rules
from tests.metal.planted_faults import replacing

pytestmark = [pytest.mark.rotate(6), pytest.mark.usefixtures("requires_clang")]


@pytest.fixture(params=[(227, 90), (99, 89)], ids=["9.0", "8.9"])
def gradients(request):
    """Replaces the fixture of test_metal_large_gradients.py, and computes gradients with CUDA's kernels.

    request.param: (KiB of shared memory per block, compute capability * 10).
    """
    is_hopper = request.param[1] == 90

    def of(query, key, value, dout, scale, edit=lambda source: source):
        kernel = "cuda_decode" if query.shape[-2] <= 16 else "cuda_prefill_hopper" if is_hopper else "cuda_prefill"
        with launches.shared_memory(*request.param):
            exact_out = query.dtype != mx.float32
            saved = cuda_attention.run(query, key, value, scale, kernel=kernel, exact_out=exact_out).saved
            got = cuda_attention.run_backward(Call(query, key, value, dout, scale=scale), saved, edit=edit)
        return got.dq, got.dk, got.dv

    return of


globals().update({name: test for name, test in vars(rules).items() if name.startswith("test")})


@pytest.mark.parametrize(("dtype", "size"), [case for case in rules.SIZES if case[0] != "float32" or case[1] > 1e4])
def test_behind_a_decode_step(rng, dtype, size, gradients):
    rules.assert_obey_the_rule_beside_large_scores(rng, dtype, size, gradients, 9)


# Tensor cores leave out rows with large scores, and other code adds these rows. Each fault is in one of the two steps.
FAULTS = {
    "not left out": ("? INFINITY : saved.log2_sum", "? saved.log2_sum : saved.log2_sum"),
    "not added": ("is_left_out(largest)) != 0", "false) != 0"),
    "over the others": ("add ? float(target[column]) : 0.0f", "0.0f"),
    "others, too": ("if (add && !is_left_out(of_query.row_max)) continue;", ""),
    "of queries that no key has met": ("fabsf(saved_columns[i + lane % COLUMNS].x)", "0.0f"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(rng, name, gradients):
    with_fault = functools.partial(gradients, edit=replacing(*FAULTS[name]))
    with pytest.raises(AssertionError, match=r"d[qkv]"):
        rules.assert_obey_the_rule_beside_large_scores(rng, "bfloat16", 1e3, with_fault, 40)
