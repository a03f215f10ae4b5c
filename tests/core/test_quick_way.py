"""Calls without softcap, ALiBi slopes, stream, kernel name or lse skip most Python code and go straight to C++.

Their results and error messages must be those of the longer way through Python.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import _ext, flash_attention
from flashattn_core.arguments import lowered
from flashattn_core.attention import _attention

from tests.core.oracle import DTYPES, assert_same_bits, draw
from tests.promises import promise


def quick(query, key, value, scale=None, mask=None, sinks=None, rounds=False, mlx=None):
    return _ext.quick(query, key, value, scale, mask, sinks, rounds, mlx, mask)


@pytest.fixture
def arrays(rng):
    return draw(rng, heads=4, kv_heads=2, length=20, key_len=30)


OWN = mx.fast.scaled_dot_product_attention
CALLS = {
    "plain": {},
    "instead of MLX's": {"mlx": OWN, "scale": 0.3},
    "all": {"mask": "causal", "scale": -0.3, "sinks": mx.zeros(4), "rounds": True},
}


@promise("the fast path of plain calls gives the bits of the long path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
def test_the_same_bits(rng, call, dtype):
    arrays = draw(rng, heads=4, kv_heads=2, length=20, key_len=30, dtype=dtype)
    given = {name: value for name, value in CALLS[call].items() if name not in ("rounds", "mlx")}
    if "sinks" in given:
        given["sinks"] = given["sinks"].astype(arrays[0].dtype)
    expected = _attention(lowered(*arrays, **given), False, None)
    assert_same_bits(quick(*arrays, **CALLS[call] | given), expected)


INSTEAD = {"mlx": OWN}
OTHERS = {
    "a whole number": {"scale": 1},
    "numpy's number": {"scale": np.float64(0.5)},
    "a number beyond float32": {"scale": 1e39},
    "not a number": {"scale": float("nan")},
    "another word": {"mask": "Causal"},
    "a mask": {"mask": mx.ones((20, 30), mx.bool_)},
    "a list of sinks": {"sinks": [0.0] * 4},
    "numpy's query": {"query": np.zeros((1, 4, 20, 16))},
    "no key": {"key": None},
    "three dimensions instead of MLX's": {**{n: mx.zeros((2, 4, 16)) for n in ("query", "key", "value")}, **INSTEAD},
    "no scale instead of MLX's": INSTEAD,
    "another dtype": {"value": mx.zeros((1, 2, 30, 16), mx.float16)},
}


@promise("the fast path takes no other calls")
@pytest.mark.parametrize("what", OTHERS)
def test_all_else_goes_the_long_way(arrays, what):
    call = dict(zip(("query", "key", "value"), arrays, strict=True)) | OTHERS[what]
    assert quick(**call) is None


@pytest.mark.parametrize("kind", [tuple, list])
def test_quantised_keys(rng, kind):
    query, *arrays = draw(rng, heads=4, kv_heads=2, length=20, key_len=30, dim=64)
    key, value = (kind(mx.quantize(x, 32, 4)) for x in arrays)
    how = {"group_size": 32, "bits": 4}
    expected = _attention(lowered(query, key, value, mask="causal", **how), False, None)

    def quickly(query, key):
        return _ext.quick(query, key, value, None, "causal", None, False, **how)

    assert_same_bits(quickly(query, key), expected)
    for other in (key[:2], arrays[0], kind([*key[:2], None])):
        assert quickly(query, other) is None
    assert quickly(query.astype(mx.float16), key) is None


def test_it_is_lazy_and_runs_on_the_default_stream(arrays):
    _ext.reset_stats()
    with mx.stream(mx.new_stream(mx.cpu)):
        out = quick(*arrays)
        assert not any(_ext.stats().values())
        mx.eval(out)
    assert _ext.stats()["cpu_prefill"] == 1


def test_a_compiled_function_and_a_gradient_go_it_too(arrays):
    query, key, value = arrays
    expected = flash_attention(query, key, value)
    assert_same_bits(mx.compile(quick)(query, key, value), expected)
    of_quick = mx.grad(lambda q: quick(q, key, value).sum())(query)
    assert_same_bits(of_quick, mx.grad(lambda q: _attention(lowered(q, key, value), False, None).sum())(query))
    assert_same_bits(mx.vmap(quick)(*(x[None] for x in arrays))[0], expected)
