"""It is an error to use more than 32 KB of threadgroup memory, more than 1024 threads, or half a SIMD group."""

import pytest

from tests.emulators.metal_on_cpu import LimitError
from tests.emulators.small_kernels import run, run_text

USE = "threadgroup float x[{}]; threadgroup half y[{}]; x[lane] = 1; y[lane] = 1; out[lane] = x[lane] + y[lane];"


@pytest.mark.parametrize("sizes", [(8193, 32), (8192, 32), (32, 16384)], ids=str)
def test_too_much_threadgroup_memory(sizes):
    with pytest.raises(LimitError, match=r"threadgroup memory: \d+ bytes.*32768"):
        run(USE.format(*sizes), threads=32)


def test_all_threadgroup_memory_may_be_used():
    run(USE.format(8176, 32), threads=32)


@pytest.mark.parametrize("size", [(1056, 1, 1), (32, 33, 1), (48, 1, 1), (1, 1, 1), (0, 1, 1)], ids=str)
def test_wrong_number_of_threads(size):
    with pytest.raises(LimitError, match="threads in a threadgroup"):
        run_text("kernel void k() {}", threadgroup=size, buffers={})


@pytest.mark.parametrize("size", [(1024, 1, 1), (8, 4, 1), (4, 8, 32)], ids=str)
def test_right_number_of_threads(size):
    run_text("kernel void k() {}", threadgroup=size, buffers={})
