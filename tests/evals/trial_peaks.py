"""The peak memory of trials, which a process of its own measures."""

import mlx.core as mx
from flash_evals import measure

MB = 1_000_000


def three_peaks(method, megabytes):
    """Of the same work three times, beside garbage that a collection would free meanwhile."""
    if method == "allocator":
        measure.memory_method = lambda: "peak of MLX's allocator"
    garbage = [mx.ones(10 * MB)]
    mx.eval(garbage)
    garbage.append(garbage)
    del garbage

    def work():
        _enough_for_a_collection = [[] for _ in range(5000)]
        mx.eval(mx.ones(megabytes * MB, dtype=mx.uint8))

    return [measure.run("off", work, 0, measure.Flash())[1].peak_memory_mb for _ in range(3)]
