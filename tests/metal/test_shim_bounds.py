"""Accesses out of bounds, exact to the byte, and writes to what is constant."""

import numpy as np
import pytest
from metal_on_cpu import MetalError, OutOfBoundsError, View
from small_kernels import launcher, one_kernel

ARGUMENTS = "device const float* in [[buffer(0)]], device float* out [[buffer(1)]], constant int& n [[buffer(2)]]"


def run(body, bodies=()):
    zeros = np.zeros(64, np.float32)
    buffers = {0: zeros, 1: zeros, 2: np.int32(64)}
    launcher(ARGUMENTS, [*bodies, body], body)(grid=(1, 1, 1), threadgroup=(64, 1, 1), buffers=buffers)


def test_all_of_a_buffer_may_be_used():
    run("out[thread_index] = in[n - 1 - thread_index];")


OUTSIDE = [
    ("out[thread_index + 1] = 1;", r"buffer 1 \(out\): write of 4 bytes at offset 256, but it has 256 bytes"),
    ("out[int(thread_index) - 1] = 1;", r"buffer 1 \(out\): write of 4 bytes at offset -4, but"),
    ("out[thread_index] = in[thread_index + 1];", r"buffer 0 \(in\): read of 4 bytes at offset 256, but"),
    ("out[thread_index] = in[thread_index + 1000000];", r"buffer 0 \(in\): read of 4 bytes at offset 4000000, but"),
    ("*(device uchar*)(out + 64) = 1;", r"write of 1 bytes at offset 256"),
    ("*(device float2*)(out + 63) = float2(1);", r"write of 8 bytes at offset 252"),
    ("out[thread_index] = (&n)[1];", r"buffer 2 \(n\): read of 4 bytes at offset 4"),
    (
        "threadgroup float x[64]; x[thread_index + 1] = 1; out[thread_index] = x[thread_index + 1];",
        r"threadgroup array 'x': write of 4 bytes at offset 256",
    ),
    ("((device float*)in)[thread_index] = 1;", r"buffer 0 \(in\) is constant, but written at offset 0"),
    ("*(device float*)(ulong)(thread_index + 16) = 1;", "wild write of 4 bytes at 0x10, in no buffer"),
    (
        "simdgroup_float8x8 m; simdgroup_load(m, in + 8, 8); simdgroup_store(m, out, 8);",
        r"buffer 0 \(in\): read of 4 bytes at offset 256",
    ),
]


@pytest.mark.parametrize(("body", "message"), OUTSIDE)
def test_outside(body, message):
    with pytest.raises(OutOfBoundsError, match=message) as caught:
        run(body, [each for each, _ in OUTSIDE])
    assert "kernels.metal:1" in str(caught.value)


def test_swapped_arguments():
    program = one_kernel(ARGUMENTS, "out[thread_index] = in[thread_index];")
    buffers = {0: np.zeros(32, np.float32), 1: np.zeros(64, np.float32), 2: np.int32(64)}  # 0 and 1 the other way round
    with pytest.raises(OutOfBoundsError, match=r"buffer 0 \(in\): read of 4 bytes at offset 128"):
        program.run("k", grid=(1, 1, 1), threadgroup=(64, 1, 1), buffers=buffers)


def test_view():
    program = one_kernel("device float* a [[buffer(0)]]", "a[int(thread_index) - 16] = thread_index;")
    array = np.zeros(48, np.float32)
    done = program.run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={0: View(array, 64)}, outputs={0})
    np.testing.assert_array_equal(done.buffers[0], [*range(32), *[0] * 16])
    with pytest.raises(OutOfBoundsError, match="offset -4, but it has 192 bytes"):
        program.run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={0: View(array, 60)})


def test_another_threads_variable():
    body = """threadgroup ulong address[1];
        float mine[4];
        if (thread_index == 0) address[0] = (ulong)mine;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index == 1) ((thread float*)address[0])[0] = 1;
        out[thread_index] = mine[thread_index % 4];"""
    with pytest.raises(OutOfBoundsError, match="wild write"):
        run(body)


def test_stack_overflow():
    body = "volatile float big[100000]; for (int i = 0; i < 100000; i++) big[i] = i; out[thread_index] = big[7];"
    with pytest.raises(MetalError, match="stack overflow of thread 0"):
        run(body)


def test_endless_loop():
    program = one_kernel("device float* out [[buffer(0)]]", "volatile int i = 0; while (i == 0) {}")
    with pytest.raises(MetalError, match=r"did not end within 0\.2 seconds"):
        program.run("k", grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers={0: np.zeros(1, np.float32)}, timeout=0.2)
