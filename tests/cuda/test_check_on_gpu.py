"""On a GPU, the first of several similar calls checks kernels and chooses one. Later calls run the chosen kernel."""

import itertools
import threading

import mlx.core as mx
import pytest
from flashattn_core import NoKernelError, _ext, attention, check, contest, flash_attention, plan, reset_stats, stats
from flashattn_core.arguments import lowered

pytestmark = pytest.mark.usefixtures("requires_gpu")

DIMS = itertools.count(24, 8)  # each test has its own head_dim, because the process remembers the results of checks


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_CHECK", "once")
    dim = next(DIMS)
    drawn = [mx.random.normal((1, heads, 40, dim), mx.float16, key=mx.random.key(heads)) for heads in (4, 2, 2)]
    mx.eval(drawn)  # in this thread, because MLX does not let other threads evaluate them
    return drawn


@pytest.fixture
def checked(monkeypatch):
    """A list to which each check adds the name of the checked kernel."""
    names, of_call = [], check.of_call

    def noted(arguments, kernel, stream):
        names.append(kernel)
        return of_call(arguments, kernel, stream)

    monkeypatch.setattr(check, "of_call", noted)
    return names


def attend(*arrays, **options):
    return flash_attention(*arrays, mask="causal", **options)


def matches(out, arrays):
    expected = attend(*(x.astype(mx.float32) for x in arrays), stream=mx.cpu)
    return mx.allclose(out.astype(mx.float32), expected, atol=2e-3)


def test_a_kernel_is_checked_once_and_the_check_is_not_counted(arrays, checked):
    reset_stats()
    outputs = [attend(*arrays) for _ in range(3)]
    mx.eval(outputs)
    assert sum(stats().values()) == 3
    assert all(matches(out, arrays) for out in outputs)
    assert len(checked) == 1


@pytest.mark.parametrize("shapeless", [False, True])
def test_the_first_call_is_compiled(arrays, checked, shapeless):
    """MLX may differentiate a compiled call later, so the gradient's kernel must be checked, too."""
    compiled = mx.compile(attend, shapeless=shapeless)
    for _ in range(2):
        assert matches(compiled(*arrays), arrays)
    assert len(checked) == 2
    assert "cuda_backward_dq" in checked


def test_the_first_call_is_mapped(arrays, checked):
    assert matches(mx.vmap(attend)(*(x[None] for x in arrays))[0], arrays)
    assert checked


def test_the_first_call_has_a_stream_of_its_own(arrays, checked):
    assert matches(attend(*arrays, stream=mx.new_stream(mx.gpu)), arrays)
    assert len(checked) == 1


def in_two_threads(call):
    """Two threads run call() at once, each on its own stream. Returns both results."""
    results = []

    def on_own_stream():
        with mx.stream(mx.new_stream(mx.gpu)):
            results.append(call())

    threads = [threading.Thread(target=on_own_stream) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_first_calls_come_from_two_threads(arrays, checked):
    right = in_two_threads(lambda: bool(matches(attend(*arrays), arrays)))
    assert right == [True, True]
    assert 1 <= len(checked) <= 2


def test_without_memory_for_a_check_the_next_call_is_checked(arrays, monkeypatch, checked):
    noted = check.of_call

    def has_none(*arguments):
        monkeypatch.setattr(check, "of_call", noted)
        raise MemoryError("no memory to check a kernel")

    monkeypatch.setattr(check, "of_call", has_none)
    with pytest.raises(NoKernelError, match="no memory to check a kernel"):
        attend(*arrays)
    assert matches(attend(*arrays), arrays)
    assert len(checked) == 1


# --- Calls after the first one ----------------------------------------------------------------------------------


def test_calls_like_one_that_was_settled_ask_nobody(arrays, checked, monkeypatch):
    attend(*arrays)
    monkeypatch.setattr(attention, "decide", lambda *args: pytest.fail("a call that was settled asks Python"))
    query, key, value = arrays
    for few in (arrays, (query, key[:, :, :38], value[:, :, :38])):  # 40 and 38 round up to the same power of two
        assert matches(attend(*few), few)
        out, _ = attend(*few, return_lse=True, stream=mx.new_stream(mx.gpu))
        assert matches(out, few)


def test_plan_says_what_was_settled(arrays, checked):
    before = plan(*arrays, mask="causal")
    attend(*arrays)
    after = plan(*arrays, mask="causal")
    assert (after.kernel, after.reason) == (before.kernel, "an earlier call of this kind chose this kernel")


def settle(arrays, kernel="cuda_prefill", wrong="", left=None, precision="input"):
    call = lowered(*arrays, precision=precision)
    _ext.settle(call, mx.default_device(), kernel, [], wrong, left, "a kind")


def quick(arrays, is_input_precision, instead_of_mlx):
    """Calls _ext.quick(): False leaves the call to MLX, which is faster. None means that no kernel is chosen yet."""
    return _ext.quick(*arrays, 0.125, None, None, is_input_precision, instead_of_mlx)


def test_what_nobody_settled_goes_the_long_way(arrays):
    assert quick(arrays, True, True) is None


def test_what_mlxs_own_is_faster_at_is_left_to_it_and_counted(arrays):
    _ext.reset_left_calls()
    settle(arrays, left=(0.001, 0.002))
    settle(arrays, precision="float32")
    assert [quick(arrays, True, True) for _ in range(2)] == [False, False]
    assert _ext.left_calls() == [("a kind", 0.001, 0.002, 2)]
    assert isinstance(quick(arrays, True, False), mx.array)
    assert isinstance(quick(arrays, False, True), mx.array)
    assert isinstance(flash_attention(*arrays, precision="input"), mx.array)
    assert _ext.left_calls() == [("a kind", 0.001, 0.002, 2)]
    _ext.reset_left_calls()


def test_where_no_kernel_is_left_calls_and_plan_say_why(arrays):
    settle(arrays, None, wrong="cuda_prefill is wrong")
    for _ in range(2):
        with pytest.raises(NoKernelError, match=r"^\[flash_attention\] cuda_prefill is wrong$"):
            flash_attention(*arrays, precision="input")
    answer = plan(*arrays, precision="input")
    assert (answer.kernel, answer.reason) == (None, "cuda_prefill is wrong")


def test_a_shapeless_function_of_other_lengths(arrays, checked):
    compiled = mx.compile(attend, shapeless=True)
    assert matches(compiled(*arrays), arrays)
    reset_stats()
    for length in (40, 17, 1):
        few = (arrays[0][:, :, :length], *arrays[1:])
        assert matches(compiled(*few), few)
    # The reference in matches() runs CPU kernels, which are not counted here.
    ran = {name: calls for name, calls in stats().items() if calls and name.startswith("cuda")}
    assert ran == {"cuda_prefill": 2, "cuda_decode": 1}


# --- Timing -----------------------------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch):
    """A list to which each call of contest.times() appends its contestants (names of kernels, or contest.MLX)."""
    names, times = [], contest.times

    def noted(call, contestants, stream):
        names.append(list(contestants))
        return times(call, contestants, stream)

    monkeypatch.setattr(contest, "times", noted)
    return names


@pytest.fixture
def of_a_model(arrays):
    """Arrays of a head_dim for which MLX has a fused kernel."""
    return [mx.random.normal((1, heads, 200, 128), mx.bfloat16, key=mx.random.key(heads)) for heads in (4, 2, 2)]


def test_mlxs_own_is_timed_for_the_inputs_precision_alone(of_a_model, timed):
    """MLX must be timed only for precision="input", and only for the first of equal calls."""
    mx.eval(attend(*of_a_model))
    assert timed == []
    compiled = mx.compile(lambda *arrays: attend(*arrays, precision="input"))
    for _ in range(2):
        mx.eval(attend(*of_a_model, precision="input"), compiled(*of_a_model))
    contestants = [[name.partition("@")[0] for name in names] for names in timed]  # without the tiling's number
    # The plain call has a contest, and so has the compiled call, because it may need a gradient.
    assert contestants == [["cuda_prefill", contest.MLX]] * 2


def test_what_mlx_does_not_fuse_is_not_timed(of_a_model, timed):
    mx.eval(flash_attention(*of_a_model, softcap=5.0, precision="input"))
    assert timed == []


def test_a_call_that_mlxs_own_raises_for_is_ours(arrays, monkeypatch):
    def refuses(*args, **kwargs):
        if kwargs.get("force_fused"):
            return
        raise RuntimeError("[scaled_dot_product_attention] no")

    monkeypatch.setattr(contest, "mlx_attention", refuses)
    assert matches(attend(*arrays, precision="input"), arrays)


def test_first_calls_of_two_threads_are_timed(of_a_model, timed):
    def is_finite():
        out = flash_attention(*of_a_model, sinks=mx.zeros(4, mx.bfloat16), precision="input")
        return bool(mx.isfinite(out).all())

    mx.eval(of_a_model)
    assert in_two_threads(is_finite) == [True, True]
