"""In every dtype, patched attention gives the same bits as float32 attention whose result is rounded to that dtype."""

import flashattn_core
import mlx.core as mx
import mlxlm_flash_patch as flash
import pytest
from mlx_lm.models import base

from tests.patch.arms import normal
from tests.promises import promise


@promise("under the patch CPU attention equals float32 attention rounded once, in any dtype")
@pytest.mark.rotate(1, default=5)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive", "sinks"])
@pytest.mark.parametrize("length", [1, 7, 40], ids=lambda n: f"L{n}")
def test_bits_of_float32(dtype, mask, length):
    q = normal(0, 2, 14, length, 64, dtype=dtype)
    k, v = normal(1, 2, 2, 45, 64, dtype=dtype), normal(2, 2, 2, 45, 64, dtype=dtype)
    sinks = normal(3, 14, dtype=dtype) if mask == "sinks" else None
    arrays = {
        "sinks": "causal",
        "bool": mx.random.bernoulli(0.7, (length, 45), key=mx.random.key(3)),
        "additive": normal(3, 2, 1, length, 45, dtype=dtype),
    }
    mask = arrays.get(mask, mask)

    with flash.enabled(strict=True):
        routed = base.scaled_dot_product_attention(q, k, v, None, 0.1, mask, sinks)
        mx.eval(routed)

    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    sinks = None if sinks is None else sinks.astype(mx.float32)
    expected = flashattn_core.flash_attention(q, k, v, scale=0.1, mask=mask, sinks=sinks).astype(dtype)
    assert routed.dtype == dtype
    assert mx.array_equal(routed, expected)
