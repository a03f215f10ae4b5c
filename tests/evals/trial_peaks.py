"""Measures the peak memory of trials. test_measure.py runs this in a new process."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
from flash_evals.work import measure

MB = 1_000_000


def nine_peaks(method, allocate, megabytes):
    """The peaks, in MB, of nine trials of the same work. Before the first three, an array becomes garbage that only the
    garbage collector can free. The next three run in another thread. Before the last three, an allocation fails, after
    which glibc may take memory from another arena.
    """
    if method == "allocator":
        measure.memory_method = lambda: "peak of MLX's allocator"
    garbage = [mx.ones(10 * MB)]
    mx.eval(garbage)
    garbage.append(garbage)
    del garbage

    def work():
        _enough_for_a_collection = [[] for _ in range(5000)]
        if allocate == "mlx":
            mx.eval(mx.ones(megabytes * MB, dtype=mx.uint8))
        else:
            np.ones(megabytes * MB, np.uint8)

    def three_peaks():
        return [measure.run("off", work, 0, measure.Flash())[1].peak_memory_mb for _ in range(3)]

    peaks = three_peaks()
    with ThreadPoolExecutor(1) as another:
        peaks += another.submit(three_peaks).result()
    try:
        np.empty(1 << 60, np.uint8)
    except MemoryError:
        return peaks + three_peaks()
