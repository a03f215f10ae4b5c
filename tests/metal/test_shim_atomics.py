"""Atomic operations on device and threadgroup memory."""

import numpy as np
import pytest
from small_kernels import one_kernel

OPERATIONS = {
    "atomic_fetch_add_explicit(a, 3, memory_order_relaxed)": 5 + 3 * 64,
    "atomic_fetch_sub_explicit(a, 1, memory_order_relaxed)": 5 - 64,
    "atomic_fetch_max_explicit(a, int(thread_index), memory_order_relaxed)": 63,
    "atomic_fetch_min_explicit(a, -int(thread_index), memory_order_relaxed)": -63,
    "atomic_fetch_or_explicit(a, 8, memory_order_relaxed)": 13,
    "atomic_fetch_and_explicit(a, 4, memory_order_relaxed)": 4,
    "atomic_fetch_xor_explicit(a, 1, memory_order_relaxed)": 5,
    "atomic_exchange_explicit(a, 9, memory_order_relaxed)": 9,
    "atomic_store_explicit(a, 7, memory_order_relaxed)": 7,
    "atomic_load_explicit(a, memory_order_relaxed)": 5,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_device(operation):
    program = one_kernel("device atomic_int* a [[buffer(0)]]", f"{operation};")
    buffers = {0: np.array([5], np.int32)}
    done = program.run("k", grid=(1, 1, 1), threadgroup=(64, 1, 1), buffers=buffers, outputs={0})
    assert done.buffers[0] == OPERATIONS[operation]


def test_compare_exchange():
    body = """int expected = thread_index;
        while (!atomic_compare_exchange_weak_explicit(a, &expected, expected + 2, memory_order_relaxed,
                                                      memory_order_relaxed)) {}"""
    program = one_kernel("device atomic_int* a [[buffer(0)]]", body)
    buffers = {0: np.array([0], np.int32)}
    done = program.run("k", grid=(1, 1, 1), threadgroup=(64, 1, 1), buffers=buffers, outputs={0})
    assert done.buffers[0] == 128


def test_threadgroup():
    body = """threadgroup atomic_float sum;
        if (thread_index == 0) atomic_store_explicit(&sum, 0.0f, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&sum, 0.5f, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_index] = atomic_load_explicit(&sum, memory_order_relaxed);"""
    program = one_kernel("device float* out [[buffer(0)]]", body)
    buffers = {0: np.zeros(64, np.float32)}
    done = program.run("k", grid=(1, 1, 1), threadgroup=(64, 1, 1), buffers=buffers, outputs={0})
    assert (done.buffers[0] == 32).all()
