"""The CUDA kernels, run on the CPU, agree with float64 for quantised keys and values of all bits and group sizes."""

import pytest

from tests.core.test_quantised import GROUP_SIZES, assert_matches, each_bits, normal, quantised
from tests.cuda.cuda_attention import flash_attention

pytestmark = [pytest.mark.rotate(21), pytest.mark.usefixtures("requires_clang")]


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@each_bits
@pytest.mark.parametrize(("kernel", "length"), [("cuda_decode", 1), ("cuda_decode", 5), ("cuda_rowwise", 9)])
def test_equals_the_dequantised(rng, kernel, length, bits, group_size):
    how = {"group_size": group_size, "bits": bits}
    query, key, value = normal(rng, 2, 4, length, 128), *(quantised(rng, 2, 2, 150, 128, **how) for _ in range(2))
    assert_matches(query, key, value, mask="causal", kernel=kernel, schedule="random:5", attend=flash_attention, **how)
