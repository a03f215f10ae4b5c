"""The emulator reports stack overflows, endless loops, writes to constants and accesses even one byte out of bounds."""

import numpy as np
import pytest

from tests.emulators.metal_on_cpu import MetalError, OutOfBoundsError, View
from tests.emulators.small_kernels import run

ARGUMENTS = "device const float* in [[buffer(0)]], device float* out [[buffer(1)]], constant int& n [[buffer(2)]]"
F = np.zeros(64, np.float32)
BUFFERS = {0: F, 1: F, 2: np.int32(64)}

OUTSIDE = {
    "out[thread_index + 1] = 1;": r"buffer 1 \(out\): write of 4 bytes at offset 256, but it has 256 bytes",
    "out[int(thread_index) - 1] = 1;": r"buffer 1 \(out\): write of 4 bytes at offset -4, but",
    "out[thread_index] = in[thread_index + 1];": r"buffer 0 \(in\): read of 4 bytes at offset 256, but",
    "out[thread_index] = in[thread_index + 1000000];": r"buffer 0 \(in\): read of 4 bytes at offset 4000000, but",
    "*(device uchar*)(out + 64) = 1;": "write of 1 bytes at offset 256",
    "*(device float2*)(out + 63) = float2(1);": "write of 8 bytes at offset 252",
    "out[thread_index] = (&n)[1];": r"buffer 2 \(n\): read of 4 bytes at offset 4",
    "threadgroup float x[64]; x[thread_index + 1] = 1; out[thread_index] = x[thread_index + 1];": (
        "threadgroup array 'x': write of 4 bytes at offset 256"
    ),
    "((device float*)in)[thread_index] = 1;": r"buffer 0 \(in\) is constant, but written at offset 0",
    "*(device float*)(ulong)(thread_index + 16) = 1;": "wild write of 4 bytes at 0x10, in no buffer",
    "float mine[4]; threadgroup ulong x[1]; if (thread_index == 0) x[0] = (ulong)mine;"
    "threadgroup_barrier(mem_flags::mem_threadgroup); if (thread_index == 1) ((thread float*)x[0])[0] = 1;"
    "out[thread_index] = mine[thread_index % 4];": "wild write",  # thread 1 writes a variable of thread 0
}
INSIDE = "out[thread_index] = in[n - 1 - thread_index];"


def test_all_of_a_buffer_may_be_used():
    run(INSIDE, ARGUMENTS, BUFFERS, together=OUTSIDE)


@pytest.mark.parametrize("body", OUTSIDE)
def test_outside(body):
    with pytest.raises(OutOfBoundsError, match=OUTSIDE[body]) as caught:
        run(body, ARGUMENTS, BUFFERS, together=OUTSIDE)
    assert "kernels.metal:1" in str(caught.value)


def test_a_smaller_buffer():
    with pytest.raises(OutOfBoundsError, match=r"buffer 0 \(in\): read of 4 bytes at offset 252, but it has 128 bytes"):
        run(INSIDE, ARGUMENTS, BUFFERS | {0: F[:32]}, together=OUTSIDE)


def test_view():
    body, array = "out[int(thread_index) - 16] = thread_index;", np.zeros(48, np.float32)
    done = run(body, buffers={0: View(array, 64)}, threads=32)
    np.testing.assert_array_equal(done.buffers[0], [*range(32), *[0] * 16])
    with pytest.raises(OutOfBoundsError, match="offset -4, but it has 192 bytes"):
        run(body, buffers={0: View(array, 60)}, threads=32)


def test_stack_overflow():
    with pytest.raises(MetalError, match="stack overflow of thread 0"):
        run("volatile float big[100000]; for (int i = 0; i < 100000; i++) big[i] = i; out[thread_index] = big[7];")


def test_endless_loop():
    with pytest.raises(MetalError, match=r"did not end within 0\.2 seconds"):
        run("volatile int i = 0; while (i == 0) {}", timeout=0.2)
