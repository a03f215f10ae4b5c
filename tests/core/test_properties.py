"""Calls that hypothesis draws (shapes, strides, masks, options) agree with the reference."""

import mlx.core as mx
import numpy as np
from flashattn_core import flash_attention
from flashattn_core.masks import KeyRange
from hypothesis import given
from hypothesis import strategies as st

from tests.core.gradient_oracle import Call, assert_obeys_the_rule
from tests.core.oracle import DTYPES, assert_matches_reference, assert_same_bits, to_numpy
from tests.core.strategies import cases, seeds, tensors
from tests.promises import promise


@promise("random shapes, strides, masks and options stay within the same bound")
@given(cases())
def test_agrees_with_the_reference(case):
    assert_matches_reference(**case.arguments())


def dequantised(words, scales, biases, group_size, bits):
    if not words.size:  # MLX refuses some empty arrays
        return mx.zeros((*words.shape[:-1], words.shape[-1] * 32 // bits))
    return mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)


@given(cases(quantised=True))
def test_quantised_agrees_with_the_reference(case):
    """Compares float32 calls with calls on dequantised arrays. Another test compares 16-bit calls."""
    case.arrays["query"] = case.arrays["query"].astype(mx.float32)
    arguments = case.arguments()
    how = {name: arguments.pop(name) for name in ("group_size", "bits")}
    packed = {name: arguments.pop(name) for name in ("key", "value")}
    floats = {name: dequantised(*parts, **how) for name, parts in packed.items()}

    def attention(query, _key, _value, scale, mask, **options):
        return case.function(query, **packed, scale=scale, mask=mask, **how, **options)

    assert_matches_reference(**arguments, **floats, attention=attention)


@promise("on the CPU both precisions give the same bits")
@given(cases() | cases(quantised=True))
def test_the_precision_changes_no_bit(case):
    by_default = case.run()
    for precision in ("float32", "input"):
        case.made_of["precision"] = lambda arrays, precision=precision: precision
        for got, expected in zip(case.run(), by_default, strict=True):
            assert_same_bits(got, expected)


@given(cases() | cases(quantised=True))
def test_lse_changes_no_output(case):
    assert mx.array_equal(case.function(**case.arguments()), case.run()[0])


@promise("gradients of random calls stay within the same bound")
@given(cases(max_dim=80), st.data())
def test_gradients_agree_with_the_reference(case, data):
    arguments = case.arguments()
    arguments.pop("kernel", None)  # the gradient has a single kernel
    query, value = arguments["query"], arguments["value"]
    rng = np.random.default_rng(data.draw(seeds))
    dtype = {dtype: name for name, dtype in DTYPES.items()}[query.dtype]
    dout = data.draw(tensors(rng, dtype, *query.shape[:-1], value.shape[-1]))
    dlse = mx.array(rng.standard_normal(query.shape[:-1], dtype=np.float32))
    assert_obeys_the_rule(Call(**arguments, dout=dout, dlse=data.draw(st.sampled_from([None, dlse]))))


@given(seeds, st.integers(1, 40), st.integers(1, 300), st.integers(1, 299))
def test_parts_merge_by_their_lse(seed, length, key_len, cut):
    """Attention over all keys must be the sum of attention over two parts of the keys, weighted by their lse."""
    rng = np.random.default_rng(seed)
    query, key, value = (
        mx.array(rng.standard_normal((1, 2, n, 16), dtype=np.float32)) for n in (length, key_len, key_len)
    )
    cut = min(cut, key_len)
    whole, whole_lse = flash_attention(query, key, value, return_lse=True)
    parts = [flash_attention(query, key, value, mask=r, return_lse=True) for r in (KeyRange(0, cut), KeyRange(cut))]
    lse = mx.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * mx.exp(part_lse - lse)[..., None] for out, part_lse in parts)
    np.testing.assert_allclose(to_numpy(lse), to_numpy(whole_lse), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(to_numpy(merged), to_numpy(whole), rtol=1e-4, atol=1e-5)
