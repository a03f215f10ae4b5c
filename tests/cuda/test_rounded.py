"""Kernels that round probabilities once to 16 bits, as cuDNN does: in return for speed, and by name alone."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from cuda_attention import flash_attention
from flashattn_core import plan
from flashattn_core.reference import reference_attention
from oracle import assert_matches_reference, draw, to_numpy

KERNELS = ["cuda_prefill", "cuda_prefill_hopper"]


@pytest.mark.usefixtures("requires_clang")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_error_is_that_of_one_rounding(rng, kernel, dtype):
    """Beside that of rounding the result, which is all that the kernel's other form has."""
    arrays = draw(rng, length=100, key_len=200, dim=64, dtype=dtype)
    exact, _ = reference_attention(*map(to_numpy, arrays), None, None)

    def error(out):
        return np.sqrt(np.mean((to_numpy(out) - exact) ** 2))

    rounding = error(mx.array(exact).astype(arrays[0].dtype))
    assert error(flash_attention(*arrays, kernel=kernel)) <= 1.01 * rounding
    assert 1.05 * rounding < error(flash_attention(*arrays, kernel=f"{kernel}_rounded")) < 1.5 * rounding
    for mask in (None, "causal"):
        assert_matches_reference(*arrays, mask=mask, kernel=f"{kernel}_rounded", attention=flash_attention)


def test_no_call_gets_them_that_does_not_name_them(rng):
    for dtype, length, dim in itertools.product(["float32", "bfloat16"], [1, 17, 300], [8, 128, 256, 257]):
        call = draw(rng, length=length, key_len=300, dim=dim, dtype=dtype)
        assert not plan(*call, device="cuda").kernel.endswith("_rounded")


@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_is_refused(rng, kernel):
    answer = plan(*draw(rng, length=100, key_len=200), device="cuda", kernel=f"{kernel}_rounded")
    assert (answer.kernel, answer.reason) == (None, f"{kernel}_rounded takes 16-bit floats")
