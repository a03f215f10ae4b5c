"""Python threads, each with streams of its own, forward and backward at once: the bits that each call has alone."""

import threading

import mlx.core as mx
import numpy as np
from flashattn_core import flash_attention
from oracle import draw

THREADS, ROUNDS = 8, 12
LENGTHS = (1, 7, 33, 130)


def results(arrays, stream):
    """Forward and backward, on the stream."""
    with mx.stream(stream):
        outputs, gradients = mx.vjp(lambda q, k, v: flash_attention(q, k, v, mask="causal"), arrays, [arrays[0]])
        return [np.array(a) for a in (*outputs, *gradients)]


def test_many_threads_with_many_streams(rng):
    calls = [draw(rng, heads=6, length=length, key_len=600, dim=40) for length in LENGTHS]
    numbers = [[np.array(a) for a in arrays] for arrays in calls]
    expected = [results(list(arrays), mx.cpu) for arrays in calls]
    wrong, start = [], threading.Barrier(THREADS)

    def work(first):
        try:
            streams = [mx.new_stream(mx.cpu) for _ in range(3)]
            start.wait()
            for i in range(first, first + ROUNDS):
                which, stream = i % len(calls), streams[i % len(streams)]
                got = results([mx.array(a) for a in numbers[which]], stream)
                if not all(np.array_equal(a, b) for a, b in zip(got, expected[which], strict=True)):
                    wrong.append(LENGTHS[which])
        except Exception as error:
            wrong.append(error)
            start.abort()  # the others would wait for this one

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
