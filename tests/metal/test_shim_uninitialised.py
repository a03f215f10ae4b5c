"""Reads of what nobody wrote: threadgroup memory, undefined buffers; and outputs that were never written."""

import numpy as np
import pytest
from metal_on_cpu import Undefined, UninitialisedError
from small_kernels import one_kernel


def run(body, buffer, groups=1):
    program = one_kernel("device float* out [[buffer(0)]]", body)
    return program.run("k", grid=(groups, 1, 1), threadgroup=(64, 1, 1), buffers={0: buffer}, outputs={0})


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float x[64]; out[thread_index] = x[thread_index];",
        "threadgroup float x[64]; if (thread_index > 0) x[thread_index] = 1; out[thread_index] = x[thread_index];",
        # Written by the threadgroup before, which is not this one's business.
        "threadgroup float x[64]; if (group == 0) x[thread_index] = 1; out[thread_index] = x[thread_index];",
    ],
)
def test_threadgroup_memory(body):
    with pytest.raises(UninitialisedError, match=r"threadgroup array 'x': offset 0 of 256 is read by thread 0 "):
        run(body, np.zeros(128, np.float32), groups=2)


def test_undefined_buffer():
    with pytest.raises(UninitialisedError, match=r"buffer 0 \(out\): offset 0 of 256"):
        run("out[thread_index] = out[thread_index] + 1;", Undefined(64, np.float32))


def test_unwritten_outputs_are_counted():
    done = run("if (thread_index >= 5) out[thread_index] = 1;", Undefined((8, 10), np.float32))
    assert done.unwritten == {0: 5 + 16}
    assert done.buffers[0].shape == (8, 10)
    assert np.isnan(done.buffers[0]).sum() == 21


def test_a_part_of_an_element_is_not_enough():
    done = run("((device half*)out)[2 * thread_index] = 1;", Undefined(64, np.float32))
    assert done.unwritten == {0: 64}


def test_what_is_written_is_not_unwritten():
    assert run("out[thread_index] = 1;", np.zeros(64, np.float32)).unwritten == {0: 0}
