"""Threads change no bit of a result. This holds for the pool's threads, and for Python threads with own streams."""

import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import flash_attention
from flashattn_core.masks import Causal, KeyRange, Tree

from tests.core.oracle import draw
from tests.core.programs import python, run
from tests.promises import promise

THREADS, ROUNDS = 8, 12
LENGTHS = (1, 7, 33, 130)


@promise("idle threads sleep, and a forked child has threads of its own")
@pytest.mark.parametrize("threads", ["2", "3", "7"])
def test_promises(drivers, threads):
    """driver/pool.cpp tests the promises of the thread pool."""
    run(drivers / "pool", FLASHATTN_NUM_THREADS=threads)


@promise("a system that gives no more threads is no error")
def test_a_system_without_more_threads(drivers):
    run(drivers / "pool", "no more threads", FLASHATTN_NUM_THREADS="1024")


def results(arrays, stream):
    """Runs forward and backward on the stream."""
    with mx.stream(stream):
        outputs, gradients = mx.vjp(lambda q, k, v: flash_attention(q, k, v, mask="causal"), arrays, [arrays[0]])
        return [np.array(a) for a in (*outputs, *gradients)]


@promise("many threads may call at once, each with the bits that it gets alone")
def test_many_threads_with_many_streams(rng):
    """With many threads, each call must return the same bits as when it runs alone."""
    calls = [draw(rng, heads=6, length=length, key_len=600, dim=40) for length in LENGTHS]
    numbers = [[np.array(a) for a in arrays] for arrays in calls]
    expected = [results(list(arrays), mx.cpu) for arrays in calls]
    start = threading.Barrier(THREADS, timeout=60)

    def work(first):
        streams = [mx.new_stream(mx.cpu) for _ in range(3)]
        start.wait()
        for i in range(first, first + ROUNDS):
            which, stream = i % len(calls), streams[i % len(streams)]
            got = results([mx.array(a) for a in numbers[which]], stream)
            assert all(np.array_equal(a, b) for a, b in zip(got, expected[which], strict=True)), LENGTHS[which]

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))  # raises the exception of a thread, if there is one


@promise("a mask made in one thread works in every thread")
def test_a_mask_of_another_thread(rng):
    call, mask = draw(rng, length=9, key_len=300), KeyRange(mx.array([3])) & Tree.from_parents([-1, 0, 0])
    mask = Causal() & mask & mx.array(rng.random((9, 300)) > 0.5)
    expected = flash_attention(*call, mask=mask)
    with ThreadPoolExecutor(1) as thread:  # which evaluates nothing
        thread.submit(flash_attention, *call, mask=mask).result()
    with ThreadPoolExecutor(1) as thread:  # which often gets the number of the thread before
        assert thread.submit(lambda: flash_attention(*call, mask=mask).tolist()).result() == expected.tolist()


PRINT_BITS = """
import hashlib, mlx.core as mx, numpy as np, flashattn_core
from flashattn_core.masks import Causal, KeyRange, SlidingWindow
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
for length, key_len in [(1, 1), (1, 3000), (8, 1025), (33, 97), (200, 513), (700, 1500)]:
    for mask in [None, SlidingWindow(100), Causal() & KeyRange(mx.array([0, 7]))]:
        for heads, kv_heads in [(1, 1), (7, 1), (8, 2)]:
            q, k, v = (mx.array(rng.standard_normal((2, h, n, 40), dtype=np.float32))
                       for h, n in [(heads, length), (kv_heads, key_len), (kv_heads, key_len)])
            def attention(q, k, v):
                return flashattn_core.flash_attention(q, k, v, mask=mask, sinks=mx.zeros(heads), return_lse=True)
            outputs, gradients = mx.vjp(attention, [q, k, v], [q, q[..., 0]])
            print(hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in (*outputs, *gradients))).hexdigest())
# This decode step has so many rows and keys that it does not keep all partial results at once.
q, k, v = (mx.array(rng.standard_normal((2, *shape), dtype=np.float32)) for shape in
           [(60, 8, 8), (2, 10000, 8), (2, 10000, 500)])
print(hashlib.sha256(np.asarray(flashattn_core.flash_attention(q, k, v, mask="causal")).tobytes()).hexdigest())
print(flashattn_core.backends()["cpu"].split(", ")[1])
"""


@promise("every run and any number of threads give the same bits, forward and backward")
@pytest.mark.slow("8 seconds")
def test_any_number_of_threads():
    lines = [python(PRINT_BITS, FLASHATTN_NUM_THREADS=n).stdout.splitlines() for n in ("1", "2", "7")]
    assert [text[-1] for text in lines] == ["1 thread", "2 threads", "7 threads"]
    assert len(lines[0]) == 56
    assert all(text[:-1] == lines[0][:-1] for text in lines)
