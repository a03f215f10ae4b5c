"""A GPU's kernel is checked before its first result on a machine; one that fails is not used."""

import itertools
import subprocess
import sys

import launches
import mlx.core as mx
import pytest
from flashattn_core.attention import lowered

DIMS = itertools.count(8)  # a verdict holds for a whole process: each test has a head_dim of its own


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_CHECK", "once")
    return tmp_path


@pytest.fixture
def dim():
    return next(DIMS)


class Check:
    """Finds something wrong with the kernels that are given."""

    def __init__(self, *bad):
        self.bad, self.asked = bad, []

    def __call__(self, kernel):
        self.asked.append(kernel)
        return f"{kernel} is wrong" if kernel in self.bad else ""


def prepared(dim, check, *, device="cuda", length=100, kernel="auto", **how):
    query, key = (mx.zeros((1, heads, rows, dim)) for heads, rows in ((4, length), (2, 300)))
    arguments = lowered(query, key, key, None, "causal", kernel=kernel)
    return launches.prepared(arguments, device, check=check, **how)[1]


def taken(dim, check, preferred, **how):
    query, key = (mx.zeros((1, heads, rows, dim)) for heads, rows in ((4, how.pop("length", 1)), (2, 300)))
    return launches.prepared(lowered(query, key, key, None, "causal", **how), check=check, preferred=preferred)[2]


@pytest.mark.parametrize(("device", "kernel"), [("cuda", "cuda_prefill"), ("metal", "metal_prefill_reg")])
def test_a_kernel_is_checked_once(dim, device, kernel):
    check = Check()
    for _ in range(2):
        assert prepared(dim, check, device=device) == []
    assert check.asked == [kernel]


def test_another_kind_of_call_is_checked(dim):
    check = Check()
    prepared(dim, check)
    prepared(dim, check, length=1)
    assert check.asked == ["cuda_prefill", "cuda_decode"]


@pytest.mark.parametrize(("device", "kernel"), [("cuda", "cuda_prefill"), ("metal", "metal_prefill_reg")])
def test_lengths_are_no_kind(dim, device, kernel):
    check = Check()
    for length in (100, 101, 128, 777):
        prepared(dim, check, device=device, length=length)
    assert check.asked == [kernel]


def test_what_fails_is_not_used(dim):
    check = Check("cuda_decode", "cuda_prefill")
    for _ in range(2):
        assert prepared(dim, check, length=1) == ["cuda_prefill", "cuda_decode"]
    assert check.asked == ["cuda_decode", "cuda_prefill", "cuda_rowwise"]


def test_where_none_is_left_the_first_reason_is_an_error(dim):
    check = Check("cuda_decode", "cuda_prefill", "cuda_rowwise")
    for _ in range(2):
        with pytest.raises(ValueError, match="cuda_decode is wrong"):
            prepared(dim, check, length=1)


def test_a_kernel_by_name_is_not_replaced(dim):
    with pytest.raises(ValueError, match="cuda_decode is wrong"):
        prepared(dim, Check("cuda_decode"), length=1, kernel="cuda_decode")


def test_what_is_preferred_is_checked_and_taken(dim):
    check = Check()
    assert taken(dim, check, "cuda_prefill") == "cuda_prefill"
    assert check.asked == ["cuda_prefill"]


def test_what_is_preferred_and_fails_leaves_the_others(dim):
    check = Check("cuda_prefill")
    assert taken(dim, check, "cuda_prefill") == "cuda_decode"
    assert check.asked == ["cuda_prefill", "cuda_decode"]


def test_what_is_preferred_and_cannot_run_the_call_is_not_taken(dim):
    assert taken(dim, Check(), "cuda_decode", length=100) == "cuda_prefill"


def test_a_name_goes_before_what_is_preferred(dim):
    assert taken(dim, Check(), "cuda_prefill", kernel="cuda_rowwise") == "cuda_rowwise"


def test_another_tiling_is_preferred(dim):
    assert taken(dim, Check(), "cuda_decode@2") == "cuda_decode@2"


def test_an_interrupted_check_is_made_again(dim):
    def interrupted(kernel):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(dim, interrupted)
    check = Check()
    prepared(dim, check)
    assert check.asked == ["cuda_prefill"]


# --- Another process ----------------------------------------------------------------------------------------

PROCESS = """
import sys
sys.path[:0] = {path!r}
from test_trusted_kernels import Check, prepared
check = Check()
prepared({dim}, check, driver={driver!r})
print(*check.asked)
"""


def asked_by_another_process(dim, driver="a driver"):
    program = PROCESS.format(path=sys.path, dim=dim, driver=driver)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_what_passed_is_not_checked_by_the_next_process(dim):
    assert asked_by_another_process(dim) == "cuda_prefill"
    assert asked_by_another_process(dim) == ""


def test_always(dim, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "always")
    for _ in range(2):
        assert asked_by_another_process(dim) == "cuda_prefill"


def test_never(dim, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "never")
    check = Check("cuda_prefill")
    assert prepared(dim, check) == check.asked == []


def test_nonsense_is_refused(dim, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CHECK", "sometimes")
    with pytest.raises(ValueError, match="FLASHATTN_CHECK is 'sometimes', expected 'once', 'always' or 'never'"):
        prepared(dim, Check())


def test_another_driver_is_checked(dim):
    assert asked_by_another_process(dim) == "cuda_prefill"
    assert asked_by_another_process(dim, "a newer driver") == "cuda_prefill"


def test_another_text_is_checked(dim, monkeypatch):
    assert asked_by_another_process(dim) == "cuda_prefill"
    monkeypatch.setenv("FLASHATTN_PLANT", "RowResult{ => RowResult {")
    assert asked_by_another_process(dim) == "cuda_prefill"


def test_a_plant_that_is_none_is_refused(dim, monkeypatch):
    monkeypatch.setenv("FLASHATTN_PLANT", "RowResult")
    with pytest.raises(ValueError, match="FLASHATTN_PLANT is 'RowResult', expected 'old => new'"):
        prepared(dim, Check())


def test_what_failed_is_checked_by_the_next_process(dim):
    with pytest.raises(ValueError, match="wrong"):
        prepared(dim, Check("cuda_prefill"), kernel="cuda_prefill")
    assert asked_by_another_process(dim) == "cuda_prefill"


def test_a_broken_file_is_not_believed(dim, cache):
    asked_by_another_process(dim)
    [file] = (cache / "checked").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert asked_by_another_process(dim) == "cuda_prefill"


def test_without_a_place_to_keep_it_each_process_checks(dim, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", "/dev/null")
    for _ in range(2):
        assert asked_by_another_process(dim) == "cuda_prefill"
