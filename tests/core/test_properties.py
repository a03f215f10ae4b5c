"""Calls that hypothesis draws (shapes, strides, masks, options) agree with the reference."""

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.core.gradient_oracle import Call, assert_obeys_the_rule
from tests.core.oracle import DTYPES, assert_matches_reference, assert_same_bits
from tests.core.strategies import cases, seeds, tensors
from tests.core.test_quantised import assert_matches
from tests.promises import promise


@promise("random shapes, strides, masks and options stay within the same bound")
@given(cases())
def test_agrees_with_the_reference(case):
    assert_matches_reference(**case.arguments())


@given(cases(quantised=True))
def test_quantised_agrees_with_the_reference(case):
    """Compares float32 calls with calls on dequantised arrays. Another test compares 16-bit calls."""
    case.arrays["query"] = case.arrays["query"].astype(mx.float32)
    assert_matches(**case.arguments())


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
