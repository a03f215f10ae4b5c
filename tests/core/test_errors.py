"""Bad input raises a ValueError that names the argument, the expected values and the value found."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import NoKernelError, flash_attention, plan
from flashattn_core.masks import Causal, KeyRange, Tree

from tests.core.programs import python
from tests.promises import promise

GOOD = {"query": (2, 8, 5, 16), "key": (2, 2, 9, 16), "value": (2, 2, 9, 12)}


def arrays(**shapes):
    return {name: mx.zeros(shape) for name, shape in {**GOOD, **shapes}.items()}


SHAPES = [
    ({"query": (5, 16)}, r"query has shape \(5,16\), expected \(\*B, heads, length, dim\)"),
    ({"key": (2, 9, 16)}, r"key has shape \(2,9,16\), expected the leading dimensions of query"),
    ({"value": (1, 2, 2, 9, 12)}, r"value has shape \(1,2,2,9,12\), expected the leading"),
    ({"key": (3, 2, 9, 16)}, r"key has shape \(3,2,9,16\), expected the leading dimensions of query, \(2,8,5,16\)"),
    ({"key": (2, 2, 9, 15)}, "key has head_dim 15, expected query's 16"),
    ({"key": (2, 3, 9, 16), "value": (2, 3, 9, 12)}, "key has 3 heads, which does not divide query's 8"),
    ({"key": (2, 0, 9, 16), "value": (2, 0, 9, 12)}, "key has 0 heads"),
    ({"value": (2, 4, 9, 12)}, "value has 4 heads, expected key's 2"),
    ({"value": (2, 2, 8, 12)}, "value has length 8, expected key's 9"),
    ({"value": (2, 2, 9, 0)}, "value has head_dim 0, expected 1 to 512"),
    ({"query": (2, 8, 5, 0), "key": (2, 2, 9, 0)}, "query has head_dim 0, expected 1 to 512"),
    ({"query": (2, 8, 5, 513), "key": (2, 2, 9, 513)}, "query has head_dim 513, expected 1 to 512"),
]


@pytest.mark.parametrize("function", [flash_attention, plan])
@pytest.mark.parametrize(("shapes", "words"), SHAPES)
def test_shapes(function, shapes, words):
    with pytest.raises(ValueError, match=rf"\[flash_attention\] {words}"):
        function(**arrays(**shapes))


# These rows check the messages. test_surface_refusals.py tries many more values.
ARGUMENTS = [
    ({"query": None}, "query is None, expected an mx.array"),
    ({"key": np.zeros((2, 2, 9, 16))}, "key is a numpy.ndarray, expected an mx.array"),
    ({"query": mx.zeros(GOOD["query"], mx.int32)}, "query is int32, expected float32"),
    ({"key": mx.zeros(GOOD["key"], mx.bool_)}, "key is bool, expected float32"),
    ({"value": mx.zeros(GOOD["value"], mx.float16)}, "value is float16, expected query's float32"),
    ({"scale": float("nan")}, "scale is nan, expected a finite number"),
    ({"scale": np.complex64(1)}, "scale is a numpy.complex64, expected a finite number"),
    ({"scale": mx.array([1.0, 2.0])}, "scale is an array of float32"),
    ({"softcap": 0}, "softcap is 0.0, expected at least 1e-20"),
    ({"sinks": mx.zeros((7,))}, r"sinks has shape \(7\), expected \(8\)"),
    ({"sinks": mx.zeros((8,), mx.float64)}, "sinks is float64, expected a dtype that promotes to query's float32"),
    ({"alibi_slopes": mx.zeros((2,))}, r"alibi_slopes has shape \(2\), expected \(8\)"),
    ({"alibi_slopes": mx.zeros((8,), mx.int32)}, "alibi_slopes is int32, expected a floating dtype"),
    ({"kernel": "fast"}, "kernel is 'fast', expected one of 'auto', 'cpu_decode', 'cpu_prefill'"),
    ({"kernel": "x" * 101}, "kernel is a str of 101 characters, expected 'auto' or a kernel's name"),
    ({"precision": "float16"}, "precision is 'float16', expected 'float32' or 'input'"),
    ({"mask": "window"}, "mask is 'window', expected None, 'causal'"),
    ({"mask": mx.ones((5, 8), mx.bool_)}, r"mask has shape \(5,8\), expected one that broadcasts to \(2,8,5,9\)"),
    ({"mask": mx.ones((5, 9), mx.complex64)}, "mask is complex64"),
    ({"mask": KeyRange(mx.array([1, 2, 3]))}, r"mask \(key range start\) has shape \(3\), expected .* \(2\)"),
    ({"mask": Causal() & KeyRange(0, mx.array([[1, 2]]))}, r"mask \(key range stop\) has shape \(1,2\)"),
    ({"mask": Tree(mx.ones((10, 10), mx.bool_))}, r"mask \(tree\) has shape .* T at most key's length, 9"),
    ({"mask": Tree(mx.ones((3, 4, 4), mx.bool_))}, r"mask \(tree\) has shape \(3,4,1\)"),
]


@promise("bad input raises a ValueError that names the argument, the expectation and the value")
@pytest.mark.parametrize("function", [flash_attention, plan])
@pytest.mark.parametrize(("changed", "words"), ARGUMENTS)
def test_arguments(function, changed, words):
    with pytest.raises(ValueError, match=rf"\[flash_attention\] {words}"):
        function(**{**arrays(), **changed})


@pytest.mark.parametrize(
    ("name", "cure"), [("scale", "multiply query by the array"), ("softcap", "compute it outside the function")]
)
def test_a_traced_number_is_refused_because_it_would_have_no_gradient(name, cure):
    """Concrete arrays are numbers, also in functions that MLX traces or recomputes."""
    given = arrays()
    attend = lambda number: flash_attention(**given, **{name: number}).sum()  # noqa: E731
    number, one = mx.array(0.5), mx.array(1.0)
    transforms = [mx.grad(attend), mx.vmap(attend), mx.compile(attend), mx.grad(mx.checkpoint(attend))]
    for transformed in [*transforms, lambda x: mx.jvp(attend, [x], [one])]:
        with pytest.raises(ValueError, match=rf"{name} is an array of float32 .* does not trace: {cure}"):
            transformed(number if transformed is not transforms[1] else number[None])
    key, value = given["key"], given["value"]
    of_query = lambda q: flash_attention(q, key, value, **{name: number}).sum()  # noqa: E731
    mx.eval(mx.grad(mx.checkpoint(of_query))(given["query"]), mx.compile(of_query)(given["query"]))


@promise("a kernel by name that does not cover the call raises")
def test_a_named_kernel_that_does_not_cover_the_call_is_no_silent_other():
    with pytest.raises(NoKernelError, match=r"cpu_decode takes up to 8 queries, found 9"):
        flash_attention(mx.zeros((1, 1, 9, 8)), mx.zeros((1, 1, 9, 8)), mx.zeros((1, 1, 9, 8)), kernel="cpu_decode")


@promise("nonsense in FLASHATTN_NUM_THREADS or FLASHATTN_CPU_ISA is an error that names it")
@pytest.mark.rotate(1, default=5)
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        *(("FLASHATTN_NUM_THREADS", text) for text in ("0", "-1", "two", "2.5", "", "1025", "99999999999999999999")),
        *(("FLASHATTN_CPU_ISA", text) for text in ("", "sse9", "AVX2 ")),
    ],
)
def test_nonsense_in_the_environment_is_named(variable, text):
    code = """
import mlx.core as mx, flashattn_core
x = mx.ones((1, 1, 4, 8))
attend = lambda: flashattn_core.flash_attention(x, x, x)
for call in (flashattn_core.backends, attend, flashattn_core.peak_flops, flashattn_core.read_bandwidth):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    assert python(code, **{variable: text}).stdout.count(f"{variable} is '{text}', expected") == 4
