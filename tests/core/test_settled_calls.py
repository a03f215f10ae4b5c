"""The first GPU call of a kind decides which kernel runs later calls of this kind. test_one_kind() defines a kind.

The tests name Metal's kernels, but do not run them.
"""

import itertools

import mlx.core as mx
import pytest
from flashattn_core import NoKernelError
from flashattn_core.arguments import lowered
from flashattn_core.masks import Causal, KeyRange, SlidingWindow

from tests import launches

GPU = mx.Device(mx.gpu)
HEADS = itertools.count(1)  # a new number for each test, because kernel decisions outlast a test


@pytest.fixture(autouse=True)
def metal():
    if mx.cuda.is_available():
        pytest.skip("the GPU is one of CUDA's: test_check_on_gpu.py has the same on it")
    launches.reset_left_calls()


@pytest.fixture
def heads():
    return next(HEADS)


def call(heads, length=100, key_len=300, mask="causal", dims=(64, 64), dtype=mx.float16, batch=1, group=2, **how):
    query = mx.zeros((batch, group * heads, length, dims[0]), dtype)
    key, value = (mx.zeros((batch, heads, key_len, dim), dtype) for dim in dims)
    return lowered(query, key, value, None, mask, **how)


def settle(arguments, kernel="metal_prefill_tg@1", *, failed=(), wrong="", left=None, words="a kind"):
    launches.settle(arguments, GPU, kernel, list(failed), wrong, left, words)


def kernel_of(arguments):
    found = launches.looked_up(arguments, GPU)
    return found and found[0]


def test_what_was_settled_is_found(heads):
    assert launches.looked_up(call(heads), GPU) is None
    settle(call(heads))
    assert launches.looked_up(call(heads), GPU) == ("metal_prefill_tg@1", False)


@pytest.mark.parametrize(
    ("settled", "other"),
    [
        ({}, {"length": 65}),
        ({}, {"length": 128, "key_len": 512}),
        ({}, {"key_len": 257}),
        ({"mask": SlidingWindow(9)}, {"mask": SlidingWindow(16)}),
        ({"softcap": 5.0}, {"softcap": 6.0}),
    ],
    ids=str,
)
def test_one_kind(heads, settled, other):
    """Softcaps may differ within a kind. So may lengths and windows that round up to the same powers of two."""
    settle(call(heads, **settled))
    assert kernel_of(call(heads, **other)) == "metal_prefill_tg@1"


OTHERS = {  # name -> arguments of a call that decides on a kernel, arguments of a call that decides anew
    "fewer queries": ({}, {"length": 64}),
    "more queries": ({}, {"length": 129}),
    "few queries": ({"length": 3}, {"length": 4}),  # a kernel may be compiled for one number of queries
    "fewer keys": ({}, {"key_len": 256}),
    "more keys": ({}, {"key_len": 513}),
    "dtype": ({}, {"dtype": mx.bfloat16}),
    "head_dim": ({}, {"dims": (72, 72)}),
    "value_dim": ({}, {"dims": (64, 32)}),
    "heads of a group": ({}, {"group": 4}),
    "batch": ({}, {"batch": 2}),
    "no mask": ({}, {"mask": None}),
    "window": ({}, {"mask": SlidingWindow(9)}),
    "narrower window": ({"mask": SlidingWindow(9)}, {"mask": SlidingWindow(8)}),
    "wider window": ({"mask": SlidingWindow(9)}, {"mask": SlidingWindow(17)}),
    "range": ({}, {"mask": Causal() & KeyRange(3)}),
    "bool array": ({}, {"mask": mx.ones((100, 300), mx.bool_)}),
    "additive array": ({}, {"mask": mx.ones((100, 300), mx.float16)}),
    "softcap": ({}, {"softcap": 5.0}),
    "slopes": ({}, {}),  # the test adds the slopes, one for each head
    "precision": ({}, {"precision": "input"}),
    "kernel": ({}, {"kernel": "metal_prefill_tg@1"}),
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_kind_is_not_settled(heads, change):
    settled, other = OTHERS[change]
    if change == "slopes":
        other = {"alibi_slopes": mx.zeros(2 * heads)}
    settle(call(heads, **settled))
    assert kernel_of(call(heads, **other)) is None


def test_a_traced_call_is_a_kind_of_its_own(heads):
    settle(call(heads))
    key, found = mx.zeros((1, heads, 300, 64), mx.float16), []

    def traced(query):
        found.append(kernel_of(lowered(query, key, key, None, "causal")))
        return query.sum()

    mx.grad(traced)(mx.zeros((1, 2 * heads, 100, 64), mx.float16))
    assert found == [None]


@pytest.mark.parametrize("kernel", ["metal_rowwise", "metal_prefill_reg@3"])
def test_each_name_is_a_kind_of_its_own(heads, kernel):
    settle(call(heads))
    settle(call(heads, kernel=kernel), kernel)
    assert kernel_of(call(heads, kernel=kernel)) == kernel
    assert kernel_of(call(heads)) == "metal_prefill_tg@1"


def test_where_no_kernel_is_left_each_call_raises_the_reason(heads):
    settle(call(heads), None, failed=["metal_prefill_reg"], wrong="metal_prefill_reg is wrong")
    for _ in range(2):
        with pytest.raises(NoKernelError, match=r"^\[flash_attention\] metal_prefill_reg is wrong$"):
            launches.looked_up(call(heads), GPU)


def test_a_name_that_does_not_cover_the_call_raises(heads):
    with pytest.raises(NoKernelError, match="metal_decode_fast takes up to 1 queries, found 100"):
        launches.looked_up(call(heads, kernel="metal_decode_fast"), GPU)


def test_a_call_without_elements_needs_nothing_settled(heads):
    assert kernel_of(call(heads, length=0)) == "metal_decode_parallel"


def test_what_is_settled_again_replaces_it(heads):
    settle(call(heads))
    settle(call(heads), "metal_rowwise")
    assert kernel_of(call(heads)) == "metal_rowwise"


# --- Other lengths, by shapeless compilation ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "length", "kernel"),
    [
        ({}, 100, "metal_prefill_tg@1"),
        ({}, 30, "metal_prefill_tg"),  # the kernel that the kernel table chooses
        ({}, 200, "metal_prefill_reg"),
        ({"failed": ["metal_prefill_tg"]}, 30, "metal_prefill_reg"),
    ],
)
def test_the_table_decides_but_not_for_what_failed(heads, how, length, kernel):
    settle(call(heads), **how)
    assert launches.with_other_lengths(call(heads), call(heads, length), GPU) == kernel


def test_a_name_stays(heads):
    named = call(heads, kernel="metal_prefill_reg@2")
    settle(named, "metal_prefill_reg@2")
    assert launches.with_other_lengths(named, call(heads, 30), GPU) == "metal_prefill_reg@2"


def test_a_name_that_does_not_cover_them_raises(heads):
    named = call(heads, 1, kernel="metal_decode_fast")
    settle(named, "metal_decode_fast")
    with pytest.raises(NoKernelError, match="metal_decode_fast takes up to 1 queries, found 2"):
        launches.with_other_lengths(named, call(heads, 2), GPU)


# --- Calls that are left to MLX's own attention -------------------------------------------------------------


def leave(arguments):
    return launches.looked_up(arguments, GPU, may_leave=True)


def test_calls_that_are_left_are_counted_by_their_kind(heads):
    settle(call(heads), left=(0.001, 0.002), words="prompts")
    settle(call(heads, length=1), "metal_decode_fast", left=(0.003, 0.004), words="steps")
    for arguments in (call(heads), call(heads, 120), call(heads, length=1)):
        assert leave(arguments)[1]
    assert sorted(launches.left_calls()) == [("prompts", 0.001, 0.002, 2), ("steps", 0.003, 0.004, 1)]
    launches.reset_left_calls()
    assert launches.left_calls() == []


def test_who_does_not_leave_calls_counts_none(heads):
    settle(call(heads), left=(0.001, 0.002))
    assert launches.looked_up(call(heads), GPU) == ("metal_prefill_tg@1", True)
    assert launches.left_calls() == []


def test_counts_survive_that_the_kind_is_settled_again(heads):
    """settle() without `left` must keep the count. Two threads may time one kind and disagree whether MLX is faster."""
    settle(call(heads), left=(0.001, 0.002))
    leave(call(heads))
    settle(call(heads))
    assert launches.left_calls() == []
    settle(call(heads), left=(0.001, 0.003))
    leave(call(heads))
    assert launches.left_calls() == [("a kind", 0.001, 0.003, 2)]
