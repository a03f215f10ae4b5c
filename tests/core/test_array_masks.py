"""Bool and additive array masks may have any shape that broadcasts and any strides."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import KeyRange

from tests.core.gradient_oracle import assert_both_ways
from tests.core.oracle import DTYPES, draw
from tests.promises import promise

SHAPES = [
    (),
    (1,),
    (70,),
    (33, 1),
    (33, 70),
    (1, 33, 70),
    (4, 33, 70),
    (4, 1, 70),
    (2, 1, 33, 70),
    (2, 4, 1, 1),
    (2, 4, 33, 70),
]


def any_mask(rng, kind, shape):
    return mx.array(rng.random(shape) > 0.3 if kind == "bool" else rng.standard_normal(shape).astype(np.float32))


@promise("bool and additive arrays broadcast, with any strides")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_broadcasts(rng, kind, shape):
    query, key, value = draw(rng, batch=(2,), heads=4, length=33, key_len=70)
    assert_both_ways(query, key, value, mask=any_mask(rng, kind, shape))


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("length", [1, 8, 33])
def test_strided(rng, kind, length):
    query, key, value = draw(rng, batch=(2,), heads=4, length=length, key_len=70)
    whole = any_mask(rng, kind, (140, 2, length, 8))
    assert_both_ways(query, key, value, mask=whole[::-2, :, :, ::2].transpose(1, 3, 2, 0))


@pytest.mark.parametrize("mask_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_additive_dtype_must_promote_to_querys(rng, dtype, mask_dtype):
    query, key, value = draw(rng, length=9, key_len=34, dtype=dtype)
    mask = mx.array(rng.standard_normal((9, 34), dtype=np.float32)).astype(DTYPES[mask_dtype])
    if mx.result_type(mask, query) == query.dtype:
        assert_both_ways(query, key, value, mask=KeyRange(1) & mask)  # GPUs read two numbers at an even key only
    else:
        words = f"mask is {mask_dtype}, expected a dtype that promotes to query's {dtype}"
        with pytest.raises(ValueError, match=words):
            flash_attention(query, key, value, mask=mask)
        with pytest.raises(ValueError, match="promote"):
            mx.fast.scaled_dot_product_attention(query, key, value, scale=1.0, mask=mask)


@promise("whole numbers in an additive array are added in float32")
@pytest.mark.parametrize("length", [1, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "largest"), [("int16", 258), ("int32", 70_000), ("uint32", 2**24 + 2), ("int64", 2**40), ("uint64", 2**63)]
)
def test_whole_numbers_are_added_in_float32(length, dtype, kind, largest):
    """float16 and bfloat16 would round these numbers, or make them infinite."""
    numbers = np.array([0, largest - 1, largest], kind)
    query, key = (mx.zeros((1, 1, n, 8), DTYPES[dtype]) for n in (length, 3))
    value = mx.eye(3, dtype=key.dtype)[None, None]
    weights = np.exp(numbers.astype(np.float32) - np.float64(np.float32(largest)))
    expected = mx.array(weights / weights.sum()).astype(key.dtype)
    got = flash_attention(query, key, value, mask=mx.array(numbers))
    assert mx.allclose(got, expected, rtol=mx.finfo(key.dtype).eps, atol=1e-7)
