"""What a GPU has not: more than 32 KB of threadgroup memory, more than 1024 threads, half a SIMD group."""

import numpy as np
import pytest
from metal_on_cpu import LimitError
from small_kernels import one_kernel

ARGUMENTS = "device float* out [[buffer(0)]], threadgroup float* extra [[threadgroup(0)]]"
USE = "x[thread_index] = 1; out[thread_index] = x[thread_index];"


def run(body, threads=(64, 1, 1), memory=0):
    program = one_kernel(ARGUMENTS, body)
    buffers = {0: np.zeros(1024, np.float32)}
    program.run("k", grid=(1, 1, 1), threadgroup=threads, buffers=buffers, threadgroup_memory={0: memory})


@pytest.mark.parametrize(("floats", "memory"), [(8193, 0), (4096, 16388), (1, 32768), (64, 40000)])
def test_too_much_threadgroup_memory(floats, memory):
    with pytest.raises(LimitError, match=r"threadgroup memory: \d+ bytes.*32768"):
        run(f"threadgroup float x[{floats}]; {USE}", memory=memory, threads=(32, 1, 1))


def test_all_threadgroup_memory_may_be_used():
    run(f"threadgroup float x[4096]; threadgroup half y[2]; {USE}", memory=16380)


@pytest.mark.parametrize("threads", [(1056, 1, 1), (32, 33, 1), (48, 1, 1), (1, 1, 1), (0, 1, 1)])
def test_wrong_number_of_threads(threads):
    with pytest.raises(LimitError, match="threads in a threadgroup"):
        run("out[thread_index] = 1;", threads=threads)


@pytest.mark.parametrize("threads", [(1024, 1, 1), (8, 4, 1), (4, 8, 32)])
def test_right_number_of_threads(threads):
    run("out[thread_index] = 1;", threads=threads)
