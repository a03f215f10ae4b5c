"""flash_attention takes and refuses the arguments that mx.fast.scaled_dot_product_attention takes and refuses.

The results agree by the rule of oracle.py, with MLX's attention as one of the unfused formulas. Documented differences:
flash_attention needs one dtype for query, key and value (MLX promotes), head_dim from 1 to 512 and a finite scale. MLX
takes only four dimensions. For a query that sees no key, flash_attention returns 0 and MLX the mean of the values.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.reference import reference_attention, visible_and_bias
from hypothesis import given
from hypothesis import strategies as st

from tests.core.oracle import DTYPES, assert_within_rule, to_numpy, unfused
from tests.core.strategies import dims, layouts, lengths, seeds, tensors
from tests.promises import promise

NUMBERS = [mx.bool_, mx.uint8, mx.int8, mx.int32, mx.int64, mx.float64, mx.complex64, *DTYPES.values()]


def off_by(n):
    """Draws `n`, or rarely n + 1 or n - 1."""
    return st.sampled_from([n] * 40 + [n + 1, max(n - 1, 1)])


# No input is empty, because with empty inputs MLX 0.32.4 writes beyond its memory on the CPU. The setting
# glibc.malloc.check=3 of the C library shows this.
some = lengths.filter(bool)


@st.composite
def calls(draw):
    """Draws arguments, which are legal more often than not."""
    rng = np.random.default_rng(draw(seeds))
    dtype = draw(st.sampled_from(list(DTYPES)))
    batch, kv_heads, length, key_len, dim, value_dim = (
        draw(s) for s in (st.integers(1, 3), st.integers(1, 3), some, some, dims, dims)
    )
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 7]))
    query, key, value = (
        draw(tensors(rng, dtype, *(draw(off_by(n)) for n in shape)))
        for shape in (
            (batch, heads, length, dim),
            (batch, kv_heads, key_len, dim),
            (batch, kv_heads, key_len, value_dim),
        )
    )
    arguments = {"scale": draw(st.floats(-2, 2, width=32)), "mask": draw(st.sampled_from([None, "causal"]))}
    if draw(st.booleans()):
        target = (batch, heads, length, key_len)
        shape = tuple(
            draw(st.sampled_from([1, 1, n, n, n, draw(off_by(n))])) for n in target[draw(st.integers(0, 4)) :]
        )
        kind = draw(st.sampled_from(NUMBERS))
        numbers = np.where(rng.random(shape) > 0.7, -np.inf, rng.standard_normal(shape))
        if not mx.issubdtype(kind, mx.floating):
            numbers = rng.integers(0, 2, shape)
        arguments["mask"] = draw(layouts(mx.array(numbers.astype(np.float32)).astype(kind, stream=mx.cpu)))
    if draw(st.booleans()):
        kind = draw(st.sampled_from([DTYPES[dtype], *NUMBERS]))
        shape = (1,) * draw(st.sampled_from([0] * 9 + [1])) + (draw(off_by(heads)),)
        arguments["sinks"] = mx.array(rng.integers(-3, 4, shape).astype(np.float32)).astype(kind, stream=mx.cpu)
    return query, key, value, arguments


@promise("the op takes all arguments of MLX's own attention, with the same results")
@given(calls())
def test_takes_what_mlx_takes_and_agrees(call):
    query, key, value, arguments = call
    try:
        theirs = mx.fast.scaled_dot_product_attention(query, key, value, **arguments)
        mx.eval(theirs)
    except ValueError:
        with pytest.raises(ValueError, match=r"^\[flash_attention\] "):
            flash_attention(query, key, value, **arguments)
        return
    ours = flash_attention(query, key, value, **arguments)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    sinks = arguments.pop("sinks", None)
    visible, _ = visible_and_bias(query.shape, key.shape[-2], arguments["mask"])
    sees_any = visible.any(axis=-1)
    numbers = None if sinks is None else to_numpy(sinks)
    expected, _ = reference_attention(*map(to_numpy, (query, key, value)), **arguments, sinks=numbers)
    by_mlx = to_numpy(theirs)[sees_any]
    by_mlx = np.where(np.isfinite(by_mlx), by_mlx, expected[sees_any])  # MLX may overflow in float16
    by_steps = lambda: to_numpy(unfused(query, key, value, **arguments, sinks=sinks)[0])[sees_any]  # noqa: E731
    assert_within_rule(to_numpy(ours)[sees_any], expected[sees_any], [lambda: by_mlx, by_steps], "out")
