"""On a GPU, precision="input" adds at most the error of one rounding to a result.

It adds this error only in kernels that give probabilities to 16-bit tensor cores.
"""

import pytest
from flashattn_core import _ext
from flashattn_core.arguments import lowered
from flashattn_core.reference import reference_attention

from tests.core.oracle import draw, roundings, to_numpy
from tests.cuda.test_cuda_rules import in_reverse
from tests.cuda.test_rounded import is_exact, is_rounded_once

pytestmark = pytest.mark.usefixtures("requires_gpu")


def prefill(query, key, value, precision, small_blocks):
    variant = _ext.Variant(_ext.Kernel.cuda_prefill, precision == "input", small_blocks)
    call = lowered(query, key, value, mask="causal", precision=precision)
    return _ext.unchecked_attention(call, variant, False, None)


@pytest.mark.parametrize("layout", [lambda x: x, in_reverse], ids=["contiguous", "in reverse"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("small_blocks", [False, True])
def test_the_error_is_that_of_one_rounding(rng, small_blocks, dim, dtype, layout):
    query, key, value = draw(rng, heads=4, length=300, key_len=500, dim=dim, dtype=dtype)
    exact, _ = reference_attention(*map(to_numpy, (query, key, value)), None, "causal")
    by_float32, by_input = (
        roundings(prefill(query, layout(key), value, precision, small_blocks), exact)
        for precision in ("float32", "input")
    )
    assert is_exact(by_float32)
    assert is_rounded_once(by_input)
