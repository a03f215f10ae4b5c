"""On a GPU: a kernel is checked wherever its first call comes from, and only then."""

import itertools
import threading

import mlx.core as mx
import pytest
from flashattn_core import NoKernelError, check, flash_attention, reset_stats, stats

pytestmark = pytest.mark.usefixtures("requires_gpu")

DIMS = itertools.count(24, 8)  # a verdict holds for a whole process: each test has a head_dim of its own


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_CHECK", "once")
    dim = next(DIMS)
    drawn = [mx.random.normal((1, heads, 40, dim), mx.float16, key=mx.random.key(heads)) for heads in (4, 2, 2)]
    mx.eval(drawn)  # else it is this thread's stream alone that can
    return drawn


@pytest.fixture
def checked(monkeypatch):
    """The names of the kernels that are checked."""
    names, of_call = [], check.of_call

    def noted(arguments, kernel, stream):
        names.append(kernel)
        return of_call(arguments, kernel, stream)

    monkeypatch.setattr(check, "of_call", noted)
    return names


def matches(out, arrays):
    expected = flash_attention(*(x.astype(mx.float32) for x in arrays), mask="causal", stream=mx.cpu)
    return mx.allclose(out.astype(mx.float32), expected, atol=2e-3)


def test_a_kernel_is_checked_once(arrays, checked):
    for _ in range(3):
        assert matches(flash_attention(*arrays, mask="causal"), arrays)
    assert len(checked) == 1


def test_checks_are_not_counted(arrays, checked):
    reset_stats()
    mx.eval(flash_attention(*arrays, mask="causal"))
    assert len(checked) == 1
    assert sum(stats().values()) == 1


@pytest.mark.parametrize("shapeless", [False, True])
def test_the_first_call_is_compiled(arrays, checked, shapeless):
    """Nobody knows yet whether its gradient will be asked for: that is checked, too."""
    compiled = mx.compile(lambda *arrays: flash_attention(*arrays, mask="causal"), shapeless=shapeless)
    for _ in range(2):
        assert matches(compiled(*arrays), arrays)
    assert len(checked) == 2
    assert checked[1] == "cuda_backward_dq"


def test_the_first_call_is_mapped(arrays, checked):
    mapped = mx.vmap(lambda *arrays: flash_attention(*arrays, mask="causal"))
    assert matches(mapped(*(x[None] for x in arrays))[0], arrays)
    assert checked


def test_the_first_call_has_a_stream_of_its_own(arrays, checked):
    out = flash_attention(*arrays, mask="causal", stream=mx.new_stream(mx.gpu))
    assert matches(out, arrays)
    assert len(checked) == 1


def test_the_first_calls_come_from_two_threads(arrays, checked):
    right = []

    def call():
        with mx.stream(mx.new_stream(mx.gpu)):
            right.append(bool(matches(flash_attention(*arrays, mask="causal"), arrays)))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True, True]
    assert 1 <= len(checked) <= 2


def test_without_memory_for_a_check_the_next_call_is_checked(arrays, monkeypatch, checked):
    noted = check.of_call

    def has_none(*arguments):
        monkeypatch.setattr(check, "of_call", noted)
        raise MemoryError("no memory to check a kernel")

    monkeypatch.setattr(check, "of_call", has_none)
    with pytest.raises(NoKernelError, match="no memory to check a kernel"):
        flash_attention(*arrays, mask="causal")
    assert matches(flash_attention(*arrays, mask="causal"), arrays)
    assert len(checked) == 1
