"""If an argument is wrong, the call and plan() compute nothing. They raise a ValueError or TypeError with its name.

The tests draw a legal call and break one argument. The message must be one line that begins with `[flash_attention]`
and contains the argument's name. A mask with a wrong part cannot be made: its constructor raises an error with the
mask's name.
"""

import math
import re

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention, plan, quantized_flash_attention, reset_stats, stats
from flashattn_core.masks import And, Causal, KeyRange, Mask, SlidingWindow, Tree
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import cases
from tests.promises import promise


class Hostile:
    """An object that raises in repr(), bool(), len() and ==. A message about it can contain no more than its type."""

    def __repr__(self):
        raise RuntimeError("repr")

    __bool__ = __len__ = __eq__ = __repr__
    __hash__ = None


HUGE = [10**400, -(10**400), 10**5000, -(10**5000)]  # Python refuses to print the last two: they have 5,001 digits
NOT_ARRAYS = [1.0, 3, True, "x", b"x", [1.0], (), {}, np.zeros((1, 2, 3, 4)), np.float32(1), mx.float32, Hostile()]
NOT_NUMBERS = ["1", b"1", bytearray(b"1"), [1.0], (), {}, 1j, math.nan, math.inf, -math.inf, 1e39, *HUGE, Hostile()]
NOT_NUMBERS += [
    np.complex64(1j),
    np.array(1j),
    mx.array(1j),
    np.float64("nan"),
    np.array([1.0, 2.0]),
    mx.array([1.0, 2.0]),
    mx.zeros(0),
    mx.array(math.nan),
]
NOT_COUNTS = [0, -1, 1.0, 1.5, math.nan, math.inf, "4", b"4", True, [4], (4,), -(10**400), -(10**5000), Hostile()]
NOT_COUNTS += [None, np.float64(4), np.True_, np.array(4.0), np.array([4]), np.array([4, 4]), mx.array(4)]
NOT_MASKS = ["", "Causal", "causal\0", "\udcff", b"causal", True, False, 0, 1.5, math.nan, [], (), (None,), {}]
NOT_MASKS += [["causal"], np.ones((1, 1), bool), Causal, [Causal()], And((3,)), And((None,)), Mask(), *HUGE, Hostile()]
NOT_KERNELS = [None, 3, b"auto", "AUTO", "", "auto ", "cpu", "\0", "auto\0", "\udcff", "é", "x" * 10**5, ["auto"]]
NOT_TREES = [None, True, [[True]], np.ones((3, 3), bool), "x", mx.array(True), mx.ones(3, mx.bool_), mx.ones((3, 3))]
NOT_TREES += [mx.ones(shape, mx.bool_) for shape in [(3, 4), (0, 0)]]
NOT_TREES += [mx.ones(shape, mx.uint32) for shape in [(3, 2), (33, 1)]]
NOT_PARENTS = [None, 5, [], (), "ab", [0], [-2], [-1, 1], [-1, 0.0], [None], [True], [-1, [0]], [mx.array(-1)]]
NOT_PARENTS += [Hostile(), [-(10**5000)], np.array([[-1, 0]]), np.array([-1.0]), mx.array([-1, 0]), {}, iter([-1])]
NOT_PARENTS += [np.array(-1), mx.array(-1)]
BAD = {
    "query": [None, *NOT_ARRAYS],
    "key": [None, *NOT_ARRAYS],
    "value": [None, *NOT_ARRAYS],
    "scale": NOT_NUMBERS,
    "mask": NOT_MASKS,
    "softcap": [*NOT_NUMBERS, 0, 0.0, -0.0, False, -1, -1e-3, 1e-30, mx.array(-1.0)],
    "sinks": NOT_ARRAYS,
    "alibi_slopes": NOT_ARRAYS,
    "kernel": [*NOT_KERNELS, Hostile()],
    "precision": [*NOT_KERNELS, "auto", "float16", "Input", mx.float32, mx.zeros(3), Hostile()],
    "stream": ["cpu", "", 0, 1, True, 1.0, [], {}, mx.float32, np.zeros(3), mx.zeros(3), Hostile()],
    "bits": [*NOT_COUNTS, 7, 9, 16, 32, 2**31, 2**70, 10**5000],
    "return_lse": [None, 0, 1, "", "x", (), [True], math.nan, np.ones(2), mx.ones(2), mx.array(True), *HUGE, Hostile()],
    "group_size": [*NOT_COUNTS, 1, 31, 63, 256, 2**31, 2**70, 10**5000],
}


def zeros(shape, dtype=mx.float32):
    """Zeros of any dtype and shape. The array takes almost no memory, because all elements are one broadcast zero."""
    return mx.broadcast_to(mx.zeros((1,) * len(shape), dtype), shape)


@promise("the call and plan() name any single wrong argument before a kernel runs")
@pytest.mark.rotate(1, default=5)
@pytest.mark.parametrize("name", BAD)
@given(st.data())
def test_one_broken_argument_is_named(name, data):
    case = data.draw(cases(quantised=True) if name in ("bits", "group_size") else cases() | cases(quantised=True))
    arguments = {**case.arguments(), name: data.draw(st.sampled_from(BAD[name]))}
    if name != "query":  # query is now the result of a lazy call. stats() counts this call if it is evaluated.
        query = arguments["query"]
        one = zeros((*query.shape[:-3], 1, 1, query.shape[-1]), query.dtype)
        arguments["query"] = flash_attention(query, one, one)
    reset_stats()
    for function in (case.function, plan):
        if function is plan and case.quantised and not isinstance(arguments["key"], tuple | list):
            continue  # plan() assumes flash_attention() if key is not a tuple or list
        with pytest.raises((ValueError, TypeError)) as refused:
            function(**arguments)
        message = str(refused.value)
        assert message.startswith("[flash_attention] ")
        assert len(message) < 700
        assert "\n" not in message
        assert re.search(rf"\b{name}\b", message), message
    assert not any(stats().values())


NOT_BOUNDS = [1.0, math.nan, "1", b"1", True, [1], (1,), mx.array([1.0]), mx.array(True), np.zeros(2), np.array(1.7)]
MASK_PARTS = {
    "[SlidingWindow] window": (SlidingWindow, NOT_COUNTS),
    "[KeyRange] start": (KeyRange, [None, *NOT_BOUNDS]),
    "[KeyRange] stop": (lambda x: KeyRange(3, x), NOT_BOUNDS),
    "[Tree] visible": (Tree, NOT_TREES),
    "[Tree] parents": (Tree.from_parents, NOT_PARENTS),
    "[Mask] Causal &": (lambda x: Causal() & x, [None, "causal", 3, True, np.ones(3), [Causal()], Causal, Hostile()]),
    "[plan] device": (
        lambda x: plan(*[mx.zeros((1, 1, 1, 8))] * 3, device=x),
        ["gpu", "", 3, True, mx.cpu, mx.zeros(3), np.zeros(3), ["cpu"], Hostile()],
    ),
}


@pytest.mark.parametrize("words", MASK_PARTS)
def test_parts_of_masks_and_plan_s_device(words):
    make, bad = MASK_PARTS[words]
    for part in bad:
        with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
            make(part)


def test_a_stream_on_a_gpu_that_is_not_there():
    if mx.metal.is_available() or mx.cuda.is_available():
        pytest.skip("there is a GPU")
    q = mx.zeros((1, 1, 1, 8))
    words = r"^\[flash_attention\] stream is on a GPU, but this MLX has neither Metal nor CUDA$"
    with pytest.raises(ValueError, match=words):
        flash_attention(q, q, q, stream=mx.gpu)
    assert plan(q, q, q, stream=mx.gpu).device == "metal"


@pytest.mark.parametrize("make", [mx.new_stream, mx.new_thread_local_stream, mx.Device, lambda device: device])
def test_every_kind_of_stream(make):
    q = mx.ones((1, 1, 1, 8))
    assert plan(q, q, q, stream=make(mx.cpu)).device == "cpu"
    assert mx.array_equal(flash_attention(q, q, q, stream=make(mx.cpu)), q)


def test_numpy_s_whole_numbers_are_whole_numbers():
    q = mx.ones((1, 1, 1, 32))
    packed = mx.quantize(q, group_size=32, bits=4)
    mask = SlidingWindow(np.array(3)) & KeyRange(np.int32(0), np.int64(9))
    out = quantized_flash_attention(q, packed, packed, group_size=np.int64(32), bits=np.uint8(4), mask=mask)
    assert out.shape == q.shape
