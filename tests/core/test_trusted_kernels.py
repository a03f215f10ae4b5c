"""A GPU's kernel is checked before its first result on a machine; one that fails is not used."""

import itertools
import subprocess
import sys

import launches
import mlx.core as mx
import pytest
from flashattn_core import _ext
from flashattn_core.arguments import lowered

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
    length, kernel = how.pop("length", 1), how.pop("kernel", "auto")
    query, key = (mx.zeros((1, heads, rows, dim)) for heads, rows in ((4, length), (2, 300)))
    arguments = lowered(query, key, key, None, "causal", kernel=kernel)
    return launches.prepared(arguments, check=check, preferred=preferred, **how)[2]


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


@pytest.mark.parametrize("kernel", ["cuda_prefill", "cuda_prefill_hopper", "metal_prefill_reg", "metal_prefill_reg@3"])
def test_what_calls_of_any_lengths_run_is_checked(kernel):
    device = kernel.partition("_")[0]

    def pipelines(query_len, key_len):
        arrays = [mx.zeros((1, heads, rows, 64), mx.float16) for heads, rows in ((4, query_len), (2, key_len))]
        arguments = lowered(*arrays, arrays[1], None, "causal", kernel=kernel)
        return {(launch["function"], *launch["constants"].items()) for launch in launches.forward(arguments, device)}

    checked = set().union(*(pipelines(*lengths) for lengths in _ext.checked_lengths))
    for lengths in itertools.product((65, 96, 128, 192, 1000, 2048), (16, 77, 1024, 2101, 4096)):
        assert pipelines(*lengths) <= checked


def test_each_tiling_is_checked(dim):
    check = Check()
    for kernel in ("metal_decode_split@1", "metal_decode_split", "metal_decode_split@2"):
        prepared(dim, check, device="metal", length=1, kernel=kernel)
    assert check.asked == ["metal_decode_split@1", "metal_decode_split", "metal_decode_split@2"]


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
    assert len(check.asked) == 3


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
    assert taken(dim, Check(), "metal_decode_split@2", device="metal") == "metal_decode_split@2"


def traced(dim, check, device="metal"):
    key = mx.zeros((1, 2, 300, dim))
    seen = []

    def call(query):
        seen.append(launches.prepared(lowered(query, key, key, None, "causal"), device, check=check))
        return query.sum()

    mx.grad(call)(mx.zeros((1, 4, 100, dim)))


@pytest.mark.parametrize("device", ["metal", "cuda"])
def test_of_a_call_that_is_traced_the_gradient_is_checked_too(dim, device):
    check = Check()
    prepared(dim, check, device=device)
    traced(dim, check, device)
    assert check.asked == [{"metal": "metal_prefill_reg", "cuda": "cuda_prefill"}[device], f"{device}_backward_dq"]


def test_a_gradient_that_is_wrong_is_an_error_while_there_is_a_choice(dim):
    check = Check("metal_backward_dq")
    for _ in range(2):
        with pytest.raises(ValueError, match="metal_backward_dq is wrong"):
            traced(dim, check)
    prepared(dim, check, device="metal")  # without a gradient it is right
    assert check.asked == ["metal_prefill_reg", "metal_backward_dq"]


def test_what_has_no_gradient_is_checked_without(dim):
    check = Check()
    traced(dim + 256, check, device="cuda")
    assert check.asked == ["cuda_rowwise"]


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
{before}
sys.path[:0] = {path!r}
from test_trusted_kernels import Check, prepared
check = Check()
prepared({dim}, check, driver={driver!r})
print(*check.asked)
"""


def another_process(dim, driver="a driver", before=""):
    program = PROCESS.format(path=sys.path, dim=dim, driver=driver, before=before)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def asked_by_another_process(*arguments, **options):
    with another_process(*arguments, **options) as process:
        asked = process.stdout.read().strip()
    assert process.returncode == 0
    return asked


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


def test_two_processes_at_once(dim, cache):
    asked = [process.communicate()[0].strip() for process in [another_process(dim) for _ in range(2)]]
    assert "cuda_prefill" in asked
    assert asked_by_another_process(dim) == ""
    assert len(list((cache / "checked").iterdir())) == 1  # and nothing unfinished


def test_a_full_disk(dim, cache):
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))"  # bytes of a file
    for _ in range(2):
        assert asked_by_another_process(dim, before=full) == "cuda_prefill"
    assert list((cache / "checked").iterdir()) == []


def test_a_file_that_can_be_neither_read_nor_replaced(dim, cache):
    """As another user's, or one in a folder that is read-only; a folder is so for every user."""
    asked_by_another_process(dim)
    [file] = (cache / "checked").iterdir()
    file.unlink()
    (file / "within").mkdir(parents=True)
    for _ in range(2):
        assert asked_by_another_process(dim) == "cuda_prefill"


def test_a_file_of_something_else_is_not_believed(dim, cache):
    asked_by_another_process(dim)
    [file] = (cache / "checked").iterdir()
    other = next(DIMS)
    asked_by_another_process(other)
    [of_other] = set((cache / "checked").iterdir()) - {file}
    of_other.write_bytes(file.read_bytes())
    assert asked_by_another_process(other) == "cuda_prefill"
