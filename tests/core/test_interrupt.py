"""Inside interruptible(), Ctrl-C ends long calls on the CPU.

A call that the main thread waits for ends half a second after Ctrl-C: its results are NaN, and KeyboardInterrupt is
raised. Calls finish as usual if they are short, if the main thread does not wait for them, or if the program handles
SIGINT itself. Without interruptible(), MLX raises KeyboardInterrupt only after the last kernel.
"""

import os
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from tests.core.programs import python
from tests.promises import promise

pytestmark = pytest.mark.slow("waits for long calls")

ANSWER = 5.0  # most seconds from the signal to KeyboardInterrupt: 1 s is promised, and a busy machine may need more
PROCESSOR = 2 * 1.0  # the most processor time that two threads can use in the promised second
BEFORE = 0.5  # seconds from a call's start to the signal

SETUP = """
import contextlib, os, signal, sys, threading, time
import mlx.core as mx
from flashattn_core import flash_attention, interruptible, quantized_flash_attention, reset_stats, stats

mx.set_default_device(mx.cpu)

def evaluated(make, *shapes):
    arrays = [make(shape) for shape in shapes]
    mx.eval(arrays)
    return arrays

def small_but_watched():  # about the shortest call that heeds Ctrl-C
    return evaluated(mx.random.normal, (1, 4, 1100, 128), (1, 1, 1100, 128), (1, 1, 1100, 128))

def long_prefill():  # two threads with AVX-512 need 10 seconds or more for it, and for each call in LONG
    return evaluated(mx.zeros, (1, 4, 65536, 64), (1, 1, 65536, 64), (1, 1, 65536, 64))

@contextlib.contextmanager
def interrupted():
    used = time.process_time()
    print("begun", os.getpid(), flush=True)
    try:
        yield
    except KeyboardInterrupt:
        print("ended", time.monotonic(), time.process_time() - used, flush=True)
    else:
        raise AssertionError("no KeyboardInterrupt")

def assert_cut(*arrays):
    with interrupted():
        mx.eval(*arrays)
    for array in arrays:
        assert mx.all(mx.isnan(array)), array

def call_of_3_seconds():
    # Repeats a call in a batch until it takes 3 seconds. Returns the call and a function that checks its result.
    q, k, v = evaluated(mx.random.normal, (1, 4, 1024, 64), (1, 1, 1024, 64), (1, 1, 1024, 64))
    expected = flash_attention(q, k, v)
    mx.eval(expected)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        mx.eval(flash_attention(q, k, v))
        seconds.append(time.perf_counter() - start)
    batch = int(3 / min(seconds)) + 1
    q, k, v = (mx.broadcast_to(x, (batch, *x.shape[1:])) for x in (q, k, v))
    mx.eval(q, k, v)

    def assert_right(out):
        assert mx.array_equal(out, mx.broadcast_to(expected, out.shape))

    return lambda **options: flash_attention(q, k, v, **options), assert_right
"""

INTERRUPTIBLE = """
watching = interruptible()
watching.__enter__()
"""

LONG = {
    "prefill": "results = flash_attention(*long_prefill(), return_lse=True)",
    "prefill in 16 bits": """
results = flash_attention(*(x.astype(mx.bfloat16) for x in long_prefill()), return_lse=True)
""",
    "decode": """
q, k = evaluated(mx.zeros, (1024, 8, 8, 64), (1, 1, 65536, 64))
k = mx.broadcast_to(k, (1024, 1, 65536, 64))
results = flash_attention(q, k, k, mask="causal", return_lse=True)
""",
    "quantised": """
q, k, _ = long_prefill()
k = mx.quantize(k, bits=8)
mx.eval(k)
results = quantized_flash_attention(q, k, k, return_lse=True)
""",
    "gradient": """
q, k, v = long_prefill()
out, lse = evaluated(mx.zeros, q.shape, q.shape[:3])
results = mx.vjp(lambda *x: flash_attention(*x, return_lse=True), [q, k, v], [out, lse])[1]
""",
}


class Answer(NamedTuple):
    seconds: float  # since the signal
    processor_seconds: float  # of all threads, since "begun" was printed


def interrupt(code: str, before: str = INTERRUPTIBLE) -> list[Answer]:
    """Runs the code `before` and then `code` in a fresh process. By default `before` enters interruptible().

    Sends SIGINT to the process half a second after each "begun" that it prints. Returns an Answer for each "ended".
    """
    answers, sent = [], 0.0
    environment = {**os.environ, "FLASHATTN_NUM_THREADS": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", SETUP + before + code], env=environment, stdout=subprocess.PIPE, text=True
    ) as child:
        for line in child.stdout:
            match line.split():
                case "begun", process:
                    time.sleep(BEFORE)
                    sent = time.monotonic()
                    os.kill(int(process), signal.SIGINT)
                case "ended", then, processor_seconds:
                    answers.append(Answer(float(then) - sent, float(processor_seconds)))
    assert child.returncode == 0
    assert answers
    return answers


def assert_ends_soon(code: str) -> None:
    for answer in interrupt(code):
        assert answer.seconds < ANSWER
        assert answer.processor_seconds < 2 * BEFORE + PROCESSOR


def assert_is_waited_for(code: str, before: str = INTERRUPTIBLE) -> None:
    (answer,) = interrupt(code, before)
    assert answer.seconds > 0.6, "the call was too short to show anything"


@promise("in interruptible() Ctrl-C ends long CPU calls, with NaN and never half a result")
@pytest.mark.rotate(2)
@pytest.mark.parametrize("call", LONG)
def test_a_long_call_ends_and_leaves_nan(call):
    assert_ends_soon(LONG[call] + "\nassert_cut(*results)")


def test_what_is_queued_and_what_has_yet_to_be_ends():
    # MLX queues a limited number of operations and then waits, so most layers reach the stream after the signal.
    assert_ends_soon("""
x, k = evaluated(mx.zeros, (1, 4, 8192, 64), (1, 1, 8192, 64))
for layer in range(40):
    x = flash_attention(x, k, k)
    small = x[..., :1, :1]
    for _ in range(40):
        small = small + 1
    x = x + small
reset_stats()
assert_cut(x)
assert stats()["cpu_prefill"] == 40
""")


@promise("a process that goes on after Ctrl-C computes as before")
def test_the_process_is_as_it_was():
    assert_ends_soon("""
calls = evaluated(mx.random.normal, (2, 4, 300, 64), (2, 2, 300, 64), (2, 2, 300, 64)), small_but_watched()
before = [flash_attention(*call) for call in calls]
q, k, v = long_prefill()
mx.eval(before)
reset_stats()
for i in range(2):
    assert_cut(*flash_attention(q, k, v, return_lse=True))
    assert all(mx.array_equal(flash_attention(*call), out) for call, out in zip(calls, before))
assert stats()["cpu_prefill"] == 6
before_sleep = time.process_time()
time.sleep(0.3)
assert time.process_time() - before_sleep < 0.1, "a thread still works"
""")


@pytest.mark.parametrize("before", ["", INTERRUPTIBLE], ids=["by default", "in the block"])
def test_a_program_with_a_handler_of_its_own_gets_its_result(before):
    assert_is_waited_for(
        """
def handler(*_):
    signals.append(1)

call, assert_right = call_of_3_seconds()
signals = []
signal.signal(signal.SIGINT, handler)
out = call()
with interrupted():
    mx.eval(out)
    assert signals == [1]
    raise KeyboardInterrupt
assert_right(out)
""",
        before,
    )


@promise("Ctrl-C ends no other call")
def test_what_nobody_waits_for_is_not_cut():
    """An mx.async_eval must finish after Ctrl-C, even if Ctrl-C ends another call that the main thread waits for."""
    assert_ends_soon("""
call, assert_right = call_of_3_seconds()
for waited in (False, True):
    out = call(stream=mx.new_stream(mx.cpu))
    mx.async_eval(out)
    if waited:
        assert_cut(flash_attention(*long_prefill()))
    else:
        with interrupted():
            time.sleep(60)
    assert_right(out)
""")


def test_a_forked_child_is_interrupted():
    assert_ends_soon("""
mx.eval(flash_attention(*small_but_watched()))
q, k, v = long_prefill()
child = os.fork()
if child == 0:
    stream = mx.new_stream(mx.cpu)  # MLX's other streams do not survive a fork
    out, lse = flash_attention(q, k, v, return_lse=True, stream=stream)
    with interrupted():
        mx.eval(out, lse)
    os._exit(0 if mx.all(mx.isnan(out, stream=stream), stream=stream) else 3)
assert os.waitpid(child, 0)[1] == 0
""")


def test_the_block_alone_touches_the_process():
    code = """
import ctypes

def handler():  # the C function that SIGINT calls, the first thing in struct sigaction
    found = ctypes.create_string_buffer(256)
    assert ctypes.CDLL(None).sigaction(signal.SIGINT, None, found) == 0
    return found.raw[:ctypes.sizeof(ctypes.c_void_p)]

def state():
    return handler(), signal.getsignal(signal.SIGINT)

watched = small_but_watched()
before = state()
mx.eval(flash_attention(*watched))
assert state() == before
with interruptible():
    assert handler() != before[0]
    inside = state()
    with interruptible():
        assert state() == inside
    assert state() == inside
assert state() == before

own = lambda *_: None
with interruptible():
    signal.signal(signal.SIGINT, own)
assert signal.getsignal(signal.SIGINT) is own, "what the block puts in stays"
with interruptible():
    signal.raise_signal(signal.SIGINT)
assert signal.getsignal(signal.SIGINT) is own

signal.signal(signal.SIGINT, signal.SIG_IGN)
ignored = state()
with interruptible():
    assert state() == ignored

def elsewhere():
    try:
        with interruptible():
            pass
    except ValueError as error:
        refused.append(str(error))
signal.signal(signal.SIGINT, signal.default_int_handler)
refused = []
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
assert "main thread" in refused[0], refused
"""
    python(SETUP + code)
