"""On a GPU, the first call that needs a program checks it. Later calls run without asking Python."""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from flashattn_core import _ext, check, flash_attention, reset_stats, stats
from flashattn_core.arguments import lowered
from flashattn_core.check import compare

pytestmark = pytest.mark.usefixtures("requires_gpu")

DIMS = itertools.count(24, 8)  # each test has its own head_dim, because the process remembers the results of checks


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_CACHE", str(tmp_path))
    monkeypatch.setenv("FLASHATTN_CHECK", "once")
    monkeypatch.setattr(check, "_tested", dict)
    dim = next(DIMS)
    drawn = [mx.random.normal((1, heads, 40, dim), mx.float16, key=mx.random.key(heads)) for heads in (4, 2, 2)]
    mx.eval(drawn)  # in this thread, because MLX does not let other threads evaluate them
    return drawn


@pytest.fixture
def checked(monkeypatch):
    """A list to which each check adds the name of the checked kernel."""
    names, of_call = [], compare.of_call

    def noted(call, variant, stream):
        names.append(variant.kernel.name)
        return of_call(call, variant, stream)

    monkeypatch.setattr(compare, "of_call", noted)
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


# --- Calls after the first one ----------------------------------------------------------------------------------


def test_calls_that_need_no_new_program_ask_nobody(arrays, checked, monkeypatch):
    attend(*arrays)
    monkeypatch.setattr(check, "wrong_with", lambda *args: pytest.fail("a call that needs no new program asks Python"))
    query, key, value = arrays
    for few in (arrays, (query[:, :, :17], key, value), (query, key[:, :, :38], value[:, :, :38])):
        assert matches(attend(*few), few)
        out, _ = attend(*few, return_lse=True, stream=mx.new_stream(mx.gpu))
        assert matches(out, few)


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


def test_what_mlx_fuses_is_what_choose_says():
    """choose() has MLX's rules for CUDA. MLX itself says what it fuses by raising an error for `force_fused`."""
    device = _ext.device_of(mx.default_device())
    wrong = []
    for dtype, dim, value_dim, length, causal, group in itertools.product(
        (mx.bfloat16, mx.float32),
        (64, 72, 80, 100, 128, 192, 256),
        (None, 64),
        (1, 3, 4, 8, 100),
        (False, True),
        (1, 7),
    ):
        query = mx.zeros((1, 2 * group, length, dim), dtype)
        key, value = mx.zeros((1, 2, 50, dim), dtype), mx.zeros((1, 2, 50, value_dim or dim), dtype)
        mask = "causal" if causal else None
        call = lowered(query, key, value, 1.0, mask, precision="input").call
        try:
            mx.fast.scaled_dot_product_attention(query, key, value, scale=1.0, mask=mask, force_fused=True)
            is_fused = True
        except ValueError:
            is_fused = False
        if is_fused != (_ext.choose(call, device).mlx is not None):
            wrong.append((str(dtype), dim, value_dim, length, causal, group, is_fused))
    assert wrong == []


def test_a_decision_makes_no_stream(arrays, monkeypatch):
    """MLX numbers its streams. A call in a thread with a stream of its own makes no default stream for the thread."""
    monkeypatch.setenv("FLASHATTN_CHECK", "never")

    def made_besides():
        own = mx.new_stream(mx.gpu)
        attend(*arrays, stream=own)
        before, after = (int(re.findall(r"\d+", str(stream))[-1]) for stream in (own, mx.new_stream(mx.gpu)))
        return after - before - 1

    with ThreadPoolExecutor(1) as pool:
        assert [pool.submit(made_besides).result() for _ in range(2)] == [0, 0]
