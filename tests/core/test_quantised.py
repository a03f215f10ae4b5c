"""Attention with keys and values in MLX's affine quantisation equals attention with the dequantised arrays."""

import itertools
import re

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import plan, quantized_flash_attention
from flashattn_core.masks import KeyRange

from tests.core.oracle import DTYPES, assert_matches_reference, packs_one_bit
from tests.core.test_grid import MASK_KINDS, mask_kinds, option_kinds
from tests.promises import promise

BITS = [1, 2, 3, 4, 5, 6, 8]
GROUP_SIZES = [32, 64, 128]
LENGTHS = [(1, 1), (1, 33), (1, 700), (2, 63), (5, 577), (8, 65), (9, 31), (33, 1), (65, 300)]

one_bit = pytest.param(1, marks=pytest.mark.skipif(not packs_one_bit(), reason="this MLX packs no numbers of 1 bit"))
each_bits = pytest.mark.parametrize("bits", [one_bit, *BITS[1:]])


def normal(rng, *shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


def quantised(rng, *shape, group_size=64, bits=8, dtype=mx.float32):
    # Runs on the CPU, because MLX's CUDA backend has no kernel for 1 bit and leaves the result unwritten.
    return mx.quantize(normal(rng, *shape, dtype=dtype), group_size=group_size, bits=bits, stream=mx.cpu)


def dequantised(packed, group_size=64, bits=8):
    """Dequantises in float32, like the kernels."""
    weights, scales, biases = packed
    if not weights.size:  # MLX refuses some empty arrays
        return mx.zeros((*weights.shape[:-1], weights.shape[-1] * 32 // bits))
    return mx.dequantize(
        weights, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group_size, bits=bits, stream=mx.cpu
    )


def assert_matches(
    query, key, value, scale=None, mask=None, *, group_size=64, bits=8, attend=quantized_flash_attention, **options
):
    how = {"group_size": group_size, "bits": bits}

    def attention(query, _key, _value, scale, mask, **others):
        return attend(query, key, value, scale, mask, **how, **others)

    floats = dequantised(key, **how), dequantised(value, **how)
    assert_matches_reference(query, *floats, scale, mask, attention=attention, **options)


@promise("quantised keys and values give the dequantised ones' result, with every option")
@pytest.mark.rotate(4, default=12)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@each_bits
def test_equals_the_dequantised(rng, bits, group_size):
    how = {"group_size": group_size, "bits": bits}
    turn = itertools.count(BITS.index(bits) + 3 * GROUP_SIZES.index(group_size))
    for (length, key_len), group in itertools.product(LENGTHS, (1, 7, 12)):
        key = quantised(rng, 2, 2, key_len, group_size, **how)
        value = quantised(rng, 2, 2, key_len, 128 if group_size != 128 else 256, **how)
        n = next(turn)
        mask = mask_kinds(rng, length, key_len)[n % MASK_KINDS]()
        options = option_kinds(rng, 2 * group)[(n + n // MASK_KINDS) % 8]
        query = normal(rng, 2, 2 * group, length, group_size)
        assert_matches(query, key, value, mask=mask, **options, **how)


VIEWS = {
    "part of a cache": lambda x: mx.concatenate([x, x * 0], axis=2)[:, :, : x.shape[2]],
    "heads inside": lambda x: mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2),
    "columns outside": lambda x: mx.contiguous(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "one for all heads": lambda x: mx.broadcast_to(x[:, :1], x.shape),
    "every other key": lambda x: mx.repeat(x, 2, axis=2)[:, :, ::2],
}


@pytest.mark.rotate(3)
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strides(rng, view, bits, length):
    key, value = (tuple(view(x) for x in quantised(rng, 2, 2, 70, 96, group_size=32, bits=bits)) for _ in range(2))
    assert_matches(normal(rng, 2, 4, length, 96), key, value, mask="causal", group_size=32, bits=bits)


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_scales_reach_nothing(rng, bad, length):
    query, packed = normal(rng, 1, 4, length, 64), quantised(rng, 1, 2, 400, 64)
    visible = (mx.arange(400) >= 7) & (mx.arange(400) < 390)
    spoilt = tuple(x if x.dtype == mx.uint32 else mx.where(visible[:, None], x, bad) for x in packed)
    for mask in (KeyRange(7, 390), visible):
        expected = quantized_flash_attention(query, packed, packed, mask=mask, return_lse=True)
        found = quantized_flash_attention(query, spoilt, spoilt, mask=mask, return_lse=True)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.array(a), np.array(b))


@promise("with quantised keys and values, a gradient of query, key or value raises")
def test_there_is_no_gradient(rng):
    packed = quantised(rng, 1, 2, 40, 64)
    with pytest.raises(ValueError, match="no kernel computes the gradient with quantised keys and values"):
        mx.grad(lambda q: quantized_flash_attention(q, packed, packed).sum())(normal(rng, 1, 4, 5, 64))


REFUSED = {
    "metal_prefill_tg": "metal_prefill_tg takes no quantised keys and values",
    "cuda_prefill": "cuda_prefill takes quantised keys and values only with 16-bit queries",
}


@pytest.mark.parametrize(
    ("kernel", "length", "dim", "dtype", "bits", "refused"),
    [
        ("cpu_decode", 1, 64, "float32", 4, None),
        ("cpu_decode", 8, 64, "float32", 4, None),
        ("cpu_prefill", 9, 64, "float32", 4, None),
        ("metal_prefill_reg", 9, 64, "float32", 8, "metal_prefill_tg"),
        ("metal_prefill_reg", 64, 256, "float32", 8, "metal_prefill_tg"),
        ("metal_rowwise", 9, 288, "float32", 8, "metal_prefill_tg"),
        ("cuda_decode", 16, 64, "bfloat16", 8, None),
        ("cuda_prefill", 17, 64, "bfloat16", 8, None),
        ("cuda_prefill", 17, 64, "float16", 4, None),
        ("cuda_prefill", 17, 64, "float16", 6, None),
        ("cuda_rowwise", 17, 64, "float32", 8, "cuda_prefill"),
    ],
)
def test_plan(rng, kernel, length, dim, dtype, bits, refused):
    """plan() must choose `kernel`, and say why `refused` cannot run the call."""
    query = mx.zeros((1, 4, length, dim), DTYPES[dtype])
    packed = quantised(rng, 1, 2, 300, dim, group_size=32, bits=bits)
    how = {"group_size": 32, "bits": bits, "device": kernel.split("_")[0]}
    chosen = plan(query, packed, packed, **how)
    assert chosen.kernel == kernel
    shape = f"L {length}, S 300, heads 4/2, D {dim}, {dtype}, keys and values of {bits} bits"
    assert str(chosen).startswith(f"{shape} on {how['device']}: {kernel}")
    if refused:
        answer = plan(query, packed, packed, **how, kernel=refused)
        assert (answer.kernel, answer.reason) == (None, REFUSED[refused])


def zeros(heads=2, dim=64):
    return mx.quantize(mx.zeros((1, heads, 40, dim)), group_size=64, bits=8)


PACKED = WEIGHTS, SCALES, BIASES = zeros()
ERRORS = [
    ({"key": WEIGHTS}, "key is an array of uint32 and shape (1, 2, 40, 16), expected (weights, scales, biases)"),
    ({"value": PACKED[:2]}, "value is a list of 2, expected (weights, scales, biases)"),
    ({"key": (WEIGHTS, None, BIASES)}, "key (scales) is None, expected an mx.array"),
    ({"bits": 4}, "key has scales of shape (1,2,40,1), expected (1,2,40,2) beside"),
    ({"bits": 7}, "bits is 7, expected 1, 2, 3, 4, 5, 6 or 8"),
    ({"group_size": 16}, "group_size is 16, expected 32, 64 or 128"),
    ({"group_size": 32}, "key has scales of shape (1,2,40,1), expected (1,2,40,2)"),
    ({"group_size": 128}, "key has 16 words in a row, expected whole groups of 128"),
    ({"key": zeros(dim=128), "value": zeros(dim=128)}, "key has head_dim 128, expected query's 64"),
    ({"key": zeros(heads=3), "value": zeros(heads=3)}, "key has 3 heads, which does not divide query's 4"),
    ({"value": (WEIGHTS.astype(mx.int32), SCALES, BIASES)}, "value is int32, expected uint32"),
    ({"value": (WEIGHTS, SCALES, BIASES.astype(mx.float16))}, "value has biases of float16"),
    ({"value": [x[:, :, 1:] for x in PACKED]}, "value has length 39, expected key's 40"),
]


@pytest.mark.parametrize(("changed", "words"), ERRORS)
def test_errors(changed, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        quantized_flash_attention(**{"query": mx.zeros((1, 4, 2, 64)), "key": PACKED, "value": PACKED, **changed})
