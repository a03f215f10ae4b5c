"""On each machine, a GPU kernel is checked before it computes its first result. A kernel that fails is not used.

Passed checks are kept in files. tests/cuda/test_cubin_cache.py tests broken files, full disks and many writers.
"""

import itertools

import mlx.core as mx
import pytest
from flashattn_core import NoKernelError, _ext
from flashattn_core.arguments import lowered

from tests import launches
from tests.gpu_calls import lowered_call, while_traced
from tests.promises import promise

DIMS = itertools.count(17)  # each test has its own head_dim, because the process remembers the results of checks


@pytest.fixture
def dim():
    return next(DIMS)


class Check:
    """A check that fails for the kernels in `bad`. `asked` lists the kernels that it was called for."""

    def __init__(self, *bad):
        self.bad, self.asked = bad, []

    def __call__(self, kernel):
        self.asked.append(kernel)
        return f"{kernel} is wrong" if kernel in self.bad else ""


def selected(check, dim, device="cuda", may_leave=False, dtype=mx.float16, **how):
    return launches.selected(lowered_call(dim=dim, dtype=dtype, **how), device, check, may_leave)


@promise("a failed kernel is not used for other lengths")
@pytest.mark.parametrize(("device", "kernel"), [("cuda", "cuda_prefill"), ("metal", "metal_prefill_reg")])
def test_a_kernel_is_checked_once_whatever_the_lengths(device, kernel, dim):
    check = Check()
    for length, key_len in ((100, 300), (101, 7), (128, 300), (777, 3000)):
        assert selected(check, dim, device=device, length=length, keys=key_len) == kernel
    assert check.asked == [kernel]


@pytest.mark.parametrize(("device", "exact"), [("cuda", 16), ("metal", 8)])
def test_each_small_number_of_queries_has_programs_of_its_own(device, exact, dim):
    check = Check()
    for length in (exact - 1, exact, exact + 1, 33, 64):
        selected(check, dim, device=device, length=length)
    assert len(check.asked) == 3


@promise("a kernel is checked in each precision in which it runs")
def test_each_precision_is_checked(dim):
    check = Check()
    for precision in ("float32", "input"):
        selected(check, dim, precision=precision)
    assert check.asked == ["cuda_prefill", "cuda_prefill"]


@pytest.mark.parametrize("how", [{"dtype": mx.float32}, {"length": 1}, {"device": "metal"}], ids=str)
def test_what_has_the_same_bits_in_both_precisions_is_checked_once(how, dim):
    check = Check()
    for precision in ("float32", "input"):
        selected(check, dim, precision=precision, **how)
    assert len(check.asked) == 1


@pytest.mark.parametrize(
    "form", ["cuda_prefill", "cuda_prefill_hopper", "cuda_prefill_hopper_rounded", "metal_prefill_reg"]
)
def test_what_calls_of_any_lengths_run_is_checked(form):
    kernel, precision, gpu = launches.form(form)
    device = kernel.partition("_")[0]

    def arguments(query_len, key_len):
        arrays = [mx.zeros((1, heads, rows, 64), mx.float16) for heads, rows in ((4, query_len), (2, key_len))]
        return lowered(*arrays, arrays[1], None, "causal", **precision)

    with gpu:
        for lengths in itertools.product((65, 96, 128, 192, 1000, 2048), (16, 77, 1024, 2101, 4096)):
            call = arguments(*lengths)
            runs = {launch["specialisation"] for launch in launches.forward(call, device, small_blocks=None)}
            assert runs <= set(launches.programs(call, device))


@promise("a GPU's kernel that differs from the CPU's is not used")
def test_what_fails_is_not_used(dim):
    check = Check("cuda_decode", "cuda_prefill")
    for _ in range(2):
        assert selected(check, dim, length=1) == "cuda_rowwise"
    assert check.asked == ["cuda_decode", "cuda_prefill", "cuda_rowwise"]


def test_what_fails_is_left_to_mlx_where_that_is_faster(dim):
    check = Check("cuda_prefill")
    for _ in range(2):
        assert selected(check, 64, keys=301, precision="input", may_leave=True, softcap=None) is None
    assert selected(check, dim, precision="input", may_leave=True) == "cuda_rowwise"  # MLX fuses no such head_dim


def test_what_is_left_is_counted_and_not_checked():
    _ext.reset_left_calls()
    check = Check()
    for _ in range(3):
        assert selected(check, 64, device="metal", precision="input", may_leave=True) is None
    assert selected(check, 64, device="metal", precision="input") == "metal_prefill_reg"
    assert check.asked == ["metal_prefill_reg"]


def test_where_none_is_left_the_first_reason_is_kept(dim):
    check = Check("cuda_decode", "cuda_prefill", "cuda_rowwise")
    for _ in range(2):
        with pytest.raises(NoKernelError, match=r"^\[flash_attention\] cuda_decode is wrong$"):
            selected(check, dim, length=1)
    assert len(check.asked) == 3


def test_a_kernel_by_name_is_not_replaced(dim):
    for _ in range(2):
        with pytest.raises(NoKernelError, match="cuda_decode is wrong"):
            selected(Check("cuda_decode"), dim, length=1, kernel="cuda_decode")


def test_what_no_kernel_covers_is_an_error_and_nothing_is_checked(dim):
    check = Check()
    with pytest.raises(NoKernelError, match="cuda_decode takes up to 16 queries, found 100"):
        selected(check, dim, kernel="cuda_decode")
    assert check.asked == []


def test_a_call_without_elements_is_not_checked(dim):
    check = Check()
    assert selected(check, dim, length=0, device="metal") == "metal_decode_parallel"
    assert check.asked == []


def traced(check, dim, device="metal", dtype=mx.float32, precision="float32"):
    return while_traced(lambda asked: launches.selected(asked, device, check), dim, dtype, precision=precision)


@promise("traced calls have their gradient checked, too")
@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_of_a_call_that_is_traced_the_gradient_is_checked_too(device, dim):
    check = Check()
    selected(check, dim, device=device, dtype=mx.float32)
    kernel = traced(check, dim, device)
    assert check.asked == [kernel, f"{device}_backward_dq"]


@promise("what the forward pass saves for a gradient is checked")
@pytest.mark.parametrize(
    ("device", "precision", "saves"), [("metal", "float32", True), ("cuda", "float32", True), ("cuda", "input", False)]
)
def test_a_kernel_that_saves_exact_out_is_checked(device, precision, saves, dim):
    check = Check()
    selected(check, dim, device=device, precision=precision)
    kernel = traced(check, dim, device, mx.float16, precision)
    assert check.asked == [kernel, *[kernel] * saves, f"{device}_backward_dq"]


def test_of_a_call_whose_gradient_is_wrong_that_is_the_reason(dim):
    check = Check("metal_backward_dq")
    for _ in range(2):
        with pytest.raises(NoKernelError, match="metal_backward_dq is wrong"):
            traced(check, dim)
    assert selected(check, dim, device="metal", dtype=mx.float32) == "metal_prefill_reg"  # this call has no gradient


def test_what_has_no_gradient_is_checked_without():
    check = Check()
    assert traced(check, 320, device="cuda") == "cuda_rowwise"
    assert check.asked == ["cuda_rowwise"]


def test_a_check_that_does_not_finish_is_made_again(dim):
    def interrupted(kernel):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selected(interrupted, dim)
    check = Check()
    selected(check, dim)
    assert check.asked == ["cuda_prefill"]
