"""Reading threadgroup memory or an undefined buffer before it is written raises an error.

Elements of an output that no thread has written are counted.
"""

import numpy as np
import pytest

from tests.emulators.metal_on_cpu import Undefined, UninitialisedError
from tests.emulators.small_kernels import run


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float x[64]; out[thread_index] = x[thread_index];",
        "threadgroup float x[64]; if (thread_index > 0) x[thread_index] = 1; out[thread_index] = x[thread_index];",
        # Threadgroup 0 writes x. Threadgroup 1 must not see these numbers: it has an x of its own, which is undefined.
        "threadgroup float x[64]; if (group == 0) x[thread_index] = 1; out[thread_index] = x[thread_index];",
    ],
)
def test_threadgroup_memory(body):
    with pytest.raises(UninitialisedError, match=r"threadgroup array 'x': offset 0 of 256 is read by thread 0 "):
        run(body, groups=2)


def test_undefined_buffer():
    with pytest.raises(UninitialisedError, match=r"buffer 0 \(out\): offset 0 of 256"):
        run("out[thread_index] = out[thread_index] + 1;", buffers={0: Undefined(64, np.float32)})


@pytest.mark.parametrize(
    ("body", "unwritten"),
    [
        ("out[thread_index] = 1;", 16),
        ("if (thread_index >= 5) out[thread_index] = 1;", 5 + 16),
        ("((device half*)out)[2 * thread_index] = 1;", 80),  # a partly written element counts as unwritten
    ],
)
def test_unwritten_outputs_are_counted(body, unwritten):
    done = run(body, buffers={0: Undefined((8, 10), np.float32)})
    assert done.unwritten == {0: unwritten}
    assert done.buffers[0].shape == (8, 10)
    assert np.isnan(done.buffers[0]).sum() == unwritten


def test_a_lane_beyond_the_group_and_a_new_matrix_give_poison():
    body = "simdgroup_float8x8 m; out[2 * lane] = simd_shuffle(1.0f, 40); out[2 * lane + 1] = m.thread_elements().x;"
    assert np.isnan(run(body, threads=32).buffers[0][:64]).all()
