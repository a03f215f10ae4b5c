"""On each machine, a GPU kernel is checked before it computes its first result. A kernel that fails is not used.

Passed checks are kept in files. tests/cuda/test_cubin_cache.py tests broken files, full disks and many writers.
"""

import itertools
from unittest.mock import Mock

import mlx.core as mx
import pytest
from flashattn_core import _ext, decide
from flashattn_core.arguments import lowered

from tests import launches
from tests.core.programs import python


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_CHECK", "once")
    monkeypatch.setattr(decide, "_verdicts", {})  # as in a process that has not checked a kernel yet
    return tmp_path


class Check:
    """A check that fails for the kernels in `bad`. `asked` lists the kernels that it was called for."""

    def __init__(self, *bad):
        self.bad, self.asked = bad, []

    def __call__(self, kernel):
        self.asked.append(kernel)
        return f"{kernel} is wrong" if kernel in self.bad else ""


def decision(check, *, device="cuda", length=100, dim=64, dtype=mx.float16, kernel="auto", precision="float32", **how):
    query, key = (mx.zeros((1, heads, rows, dim), dtype) for heads, rows in ((4, length), (2, 300)))
    arguments = lowered(query, key, key, None, "causal", kernel=kernel, precision=precision)
    return launches.decision(arguments, device, check=check, **how)[0]


@pytest.mark.parametrize(("device", "kernel"), [("cuda", "cuda_prefill"), ("metal", "metal_prefill_reg")])
def test_a_kernel_is_checked_once(device, kernel):
    """For calls that differ only in the number of queries, the kernel must be checked only once."""
    check = Check()
    for length in (100, 100, 101, 128, 777):
        assert decision(check, device=device, length=length).kernel == kernel
    assert check.asked == [kernel]


def test_each_precision_is_checked():
    check = Check()
    decision(check)
    decision(check, precision="input")
    assert check.asked == ["cuda_prefill", "cuda_prefill"]


@pytest.mark.parametrize("how", [{"dtype": mx.float32}, {"length": 1}, {"device": "metal"}], ids=str)
def test_what_has_the_same_bits_in_both_precisions_is_checked_once(how):
    check = Check()
    decision(check, **how)
    decision(check, **how, precision="input")
    assert len(check.asked) == 1


@pytest.mark.parametrize(
    "form",
    ["cuda_prefill", "cuda_prefill_hopper", "cuda_prefill_hopper_rounded", "metal_prefill_reg", "metal_prefill_reg@3"],
)
def test_what_calls_of_any_lengths_run_is_checked(form):
    kernel, precision, gpu = launches.form(form)
    device = kernel.partition("_")[0]

    def pipelines(query_len, key_len):
        arrays = [mx.zeros((1, heads, rows, 64), mx.float16) for heads, rows in ((4, query_len), (2, key_len))]
        arguments = lowered(*arrays, arrays[1], None, "causal", kernel=kernel, **precision)
        return {(launch["function"], *launch["constants"].items()) for launch in launches.forward(arguments, device)}

    checked_lengths = [*_ext.checked_lengths, *([_ext.checked_sharing] if kernel == "cuda_prefill" else [])]
    with gpu:
        checked = set().union(*(pipelines(*lengths) for lengths in checked_lengths))
        for lengths in itertools.product((65, 96, 128, 192, 1000, 2048), (16, 77, 1024, 2101, 4096)):
            assert pipelines(*lengths) <= checked


def test_each_tiling_is_checked():
    check = Check()
    for kernel in ("metal_decode_split@1", "metal_decode_split", "metal_decode_split@2"):
        assert decision(check, device="metal", length=1, kernel=kernel).kernel == kernel
    assert check.asked == ["metal_decode_split@1", "metal_decode_split", "metal_decode_split@2"]


def test_what_fails_is_not_used():
    check = Check("cuda_decode", "cuda_prefill")
    for _ in range(2):
        got = decision(check, length=1)
        assert (got.kernel, got.failed, got.wrong) == ("cuda_rowwise", ["cuda_decode", "cuda_prefill"], "")
    assert check.asked == ["cuda_decode", "cuda_prefill", "cuda_rowwise"]


def test_where_none_is_left_the_first_reason_is_kept():
    check = Check("cuda_decode", "cuda_prefill", "cuda_rowwise")
    for _ in range(2):
        got = decision(check, length=1)
        assert (got.kernel, got.wrong) == (None, "cuda_decode is wrong")
    assert len(check.asked) == 3


def test_a_kernel_by_name_is_not_replaced():
    got = decision(Check("cuda_decode"), length=1, kernel="cuda_decode")
    assert (got.kernel, got.wrong) == (None, "cuda_decode is wrong")


def test_what_no_kernel_covers_is_an_error_and_nothing_is_checked():
    check = Check()
    with pytest.raises(_ext.NoKernelError, match="cuda_decode takes up to 16 queries, found 100"):
        decision(check, kernel="cuda_decode")
    assert check.asked == []


def traced(check, device="metal", dim=64, dtype=mx.float32, precision="float32"):
    key = mx.zeros((1, 2, 300, dim), dtype)
    decisions = []

    def call(query):
        arguments = lowered(query, key, key, None, "causal", precision=precision)
        decisions.append(launches.decision(arguments, device, check=check)[0])
        return query.sum()

    mx.grad(call)(mx.zeros((1, 4, 100, dim), dtype))
    return decisions[0]


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_of_a_call_that_is_traced_the_gradient_is_checked_too(device):
    check = Check()
    decision(check, device=device, dtype=mx.float32)
    kernel = traced(check, device).kernel
    assert check.asked == [kernel, f"{device}_backward_dq"]


@pytest.mark.parametrize(
    ("device", "precision", "saves"), [("metal", "float32", True), ("cuda", "float32", True), ("cuda", "input", False)]
)
def test_a_kernel_that_saves_exact_out_is_checked(device, precision, saves):
    check = Check()
    decision(check, device=device, precision=precision)
    kernel = traced(check, device, dtype=mx.float16, precision=precision).kernel
    assert check.asked == [kernel, *[kernel] * saves, f"{device}_backward_dq"]


def test_of_a_call_whose_gradient_is_wrong_that_is_the_reason():
    check = Check("metal_backward_dq")
    for _ in range(2):
        got = traced(check)
        assert (got.kernel, got.wrong) == (None, "metal_backward_dq is wrong")
    assert decision(check, device="metal", dtype=mx.float32).kernel == "metal_prefill_reg"  # this call has no gradient


def test_what_has_no_gradient_is_checked_without():
    check = Check()
    assert traced(check, device="cuda", dim=320).kernel == "cuda_rowwise"
    assert check.asked == ["cuda_rowwise"]


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (KeyboardInterrupt("Ctrl-C"), KeyboardInterrupt),
        (MemoryError("no memory to check a kernel"), _ext.NoKernelError),
    ],
    ids=["interrupt", "no memory"],
)
def test_a_check_that_does_not_finish_is_made_again(inside, outside):
    """If the check raises `inside`, the call raises `outside`. The next call must check the kernel again."""
    with pytest.raises(outside, match=str(inside)):
        decision(Mock(side_effect=inside))
    check = Check()
    decision(check)
    assert check.asked == ["cuda_prefill"]


# --- Another process ----------------------------------------------------------------------------------------

PROCESS = """
from tests.core.test_trusted_kernels import Check, decision
decision(check := Check(), driver={driver!r})
print(*check.asked)
"""


def asked_by_another_process(driver="a driver"):
    return python(PROCESS.format(driver=driver)).stdout.strip()


def test_what_passed_is_not_checked_by_the_next_process():
    assert asked_by_another_process() == "cuda_prefill"
    assert asked_by_another_process() == ""


@pytest.mark.parametrize(("variable", "text"), [("FLASHATTN_CHECK", "always"), ("FLASHATTN_CACHE", "/dev/null")])
def test_each_process_checks(monkeypatch, variable, text):
    """Each process must check its kernels if FLASHATTN_CHECK is "always", or if it cannot write the result to disk."""
    monkeypatch.setenv(variable, text)
    for _ in range(2):
        assert asked_by_another_process() == "cuda_prefill"


def test_never(monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "never")
    check = Check("cuda_prefill")
    assert decision(check).kernel == "cuda_prefill"
    assert check.asked == []


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("FLASHATTN_CHECK", "sometimes", "'once', 'always' or 'never'"),
        ("FLASHATTN_PLANT", "RowResult", "'old => new'"),
    ],
)
def test_nonsense_in_the_environment_is_refused(monkeypatch, variable, text, expected):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} is '{text}', expected {expected}"):
        decision(Check())


def test_another_driver_is_checked():
    assert asked_by_another_process() == "cuda_prefill"
    assert asked_by_another_process("a newer driver") == "cuda_prefill"


def test_another_text_is_checked(monkeypatch):
    assert asked_by_another_process() == "cuda_prefill"
    monkeypatch.setenv("FLASHATTN_PLANT", "RowResult{ => RowResult {")
    assert asked_by_another_process() == "cuda_prefill"


def test_what_failed_is_checked_by_the_next_process():
    assert decision(Check("cuda_prefill"), kernel="cuda_prefill").wrong
    assert asked_by_another_process() == "cuda_prefill"


def test_a_broken_file_is_not_believed(cache):
    asked_by_another_process()
    [file] = (cache / "checked").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert asked_by_another_process() == "cuda_prefill"


def test_a_file_that_can_be_neither_read_nor_replaced(cache):
    """In this test the file is replaced by a folder, which a process can neither read nor replace.

    Files of other users and files in read-only folders behave in the same way.
    """
    asked_by_another_process()
    [file] = (cache / "checked").iterdir()
    file.unlink()
    (file / "within").mkdir(parents=True)
    for _ in range(2):
        assert asked_by_another_process() == "cuda_prefill"
