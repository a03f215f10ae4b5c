"""A call that cannot get memory raises an exception, and the process goes on."""

from pathlib import Path

import pytest

from tests.core.programs import library, preloads, python
from tests.promises import promise

pytestmark = pytest.mark.slow("compiles a library")

# Repeats a call. In each attempt another allocation of the extension fails, from the call's first allocation to its
# last, on any thread. Each attempt runs in a forked child, which has no thread pool and no scratch memory yet.
EACH_ALLOCATION = """
import ctypes, os, sys, traceback, mlx.core as mx
from flashattn_core import flash_attention

fail_at = ctypes.CDLL(None).fail_at
fail_at.argtypes, fail_at.restype = [ctypes.c_long], ctypes.c_bool
length, key_len, dtype, backward = {case}
q, *kv = (mx.random.normal((1, heads, n, 40)).astype(dtype) for heads, n in ((4, length), (2, key_len), (2, key_len)))

def lazy(stream):
    with mx.stream(stream):
        if backward:
            return mx.vjp(flash_attention, [q, *kv], [q])[1]
        return list(flash_attention(q, *kv, return_lse=True))

def results(stream):
    outs = lazy(stream)
    mx.eval(outs)
    return outs

expected = results(mx.cpu)

def child(number):
    stream = mx.new_stream(mx.cpu)
    is_nan = lambda outs: all(mx.isnan(a, stream=stream).all(stream=stream).item() for a in outs)
    right = lambda outs: all(mx.array_equal(a, b, stream=stream).item() for a, b in zip(outs, expected, strict=True))
    raised = ""
    fail_at(number)
    try:
        outs = lazy(stream)
        mx.eval(outs)
    except (MemoryError, RuntimeError) as error:
        raised = f"{{type(error).__name__}}: {{error}}"
    failed = fail_at(-1)
    if not failed:
        os._exit(1 if raised else 42)
    # Without memory for more threads the caller does their work.
    assert raised or right(outs), "a wrong result"
    # A kernel that raises leaves NaN. If MLX notices the error in time, it computes the results again when asked.
    assert "[flash_attention]" not in raised or is_nan(outs) or right(outs), "a plausible result"
    assert right(results(stream)), "the process does not go on"
    print(raised or "fewer threads", flush=True)
    os._exit(0)

for number in range(1000):
    pid = os.fork()
    if pid == 0:
        try:
            child(number)
        finally:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 42:
        break
    assert code == 0, (number, code)
"""


@pytest.fixture(scope="session")
def failing_allocations(tmp_path_factory):
    """A library that makes allocations of the extension fail."""
    text = Path(__file__).with_name("failing_allocations.cpp").read_text()
    return library(tmp_path_factory.mktemp("failing") / "allocations.so", text)


@promise("a lack of memory is an exception, and the process goes on")
@preloads
@pytest.mark.parametrize(
    ("case", "fewest"),
    [
        ("(1, 1500, mx.float32, False)", 8),
        ("(40, 700, mx.float32, False)", 8),
        ("(1, 1500, mx.float16, True)", 20),
        ("(40, 700, mx.float32, True)", 20),
    ],
)
def test_each_allocation(failing_allocations, case, fewest):
    done = python(EACH_ALLOCATION.format(case=case), LD_PRELOAD=failing_allocations, FLASHATTN_NUM_THREADS="3")
    outcomes = done.stdout.splitlines()
    assert len(outcomes) >= fewest
    no_memory = "RuntimeError: [flash_attention] no memory for the kernel's working arrays"
    # With a gradient, MLX prepares the backward pass while the forward pass starts threads. So the order of allocations
    # varies, and there may be no attempt in which a thread fails to start.
    threads = set() if "True" in case else {"fewer threads"}
    assert {"MemoryError: std::bad_alloc", no_memory} | threads <= set(outcomes)


@pytest.mark.parametrize("length", [1, 1 << 10])
def test_results_that_no_machine_holds(length):
    """A call with legal shapes must raise if its output exceeds the address space.

    The test runs in a process of its own, because MLX counts memory that it failed to get as used, and
    waits for each op after that.
    """
    code = f"""
import mlx.core as mx
from flashattn_core import flash_attention
query = mx.broadcast_to(mx.ones((1, 1, 1, 1, 1)), ({(1 << 20) // length}, 1 << 10, 1 << 10, {length}, 512))
out = flash_attention(query, query[:, :, :1], query[:, :, :1])
try:
    mx.eval(out)
except RuntimeError as error:
    print(error)
print(out.shape == query.shape, flash_attention(*[mx.ones((1, 1, {length}, 8))] * 3)[0, 0, 0, 0].item())
"""
    refusal = "[flash_attention] no memory for an array of 2251799813685248 bytes"
    assert python(code).stdout == f"{refusal}\nTrue 1.0\n"
