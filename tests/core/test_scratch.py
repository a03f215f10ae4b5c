"""What the CPU kernels' threads keep between calls can be given back, and is as much as the calls needed."""

import threading

import flashattn_core
import mlx.core as mx
import numpy as np

# One thread, so that what is kept does not depend on who took part.
IN_ONE_THREAD = """
import flashattn_core, mlx.core as mx

def call(dim):
    x = mx.ones((1, 2, 200, dim))
    mx.eval(flashattn_core.flash_attention(x, x, x))

def gradient(dim):
    x = mx.ones((1, 2, 200, dim))
    mx.eval(mx.grad(lambda y: flashattn_core.flash_attention(y, x, x).sum())(x))

assert flashattn_core.release_scratch() == 0
for work in (call, gradient):
    needed = {}
    for dim in (32, 256, 32):
        work(dim)
        needed.setdefault(dim, set()).add(flashattn_core.release_scratch())
        assert flashattn_core.release_scratch() == 0
    [small], [large] = needed[32], needed[256]
    assert 0 < 4 * small < large, (small, large)
"""
IN_A_FORKED_CHILD = """
import os, flashattn_core, mlx.core as mx

x = mx.ones((1, 2, 200, 32))
mx.eval(flashattn_core.flash_attention(x, x, x))
child = os.fork()
if child == 0:
    os._exit(flashattn_core.release_scratch() != 0)
assert os.waitpid(child, 0)[1] == 0
assert flashattn_core.release_scratch() > 0
"""


def test_it_is_what_the_calls_since_the_last_release_needed(run_python):
    """And not what earlier ones did, which were larger."""
    done = run_python(IN_ONE_THREAD, FLASHATTN_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def test_calls_under_way_finish_first():
    query, key, value = mx.random.normal((3, 1, 4, 700, 64))

    def attend() -> np.ndarray:
        return np.array(flashattn_core.flash_attention(query, key, value, mask="causal"))

    def release() -> None:
        while not done.is_set():
            flashattn_core.release_scratch()

    expected, done = attend(), threading.Event()
    thread = threading.Thread(target=release)
    thread.start()
    try:
        for _ in range(20):
            np.testing.assert_array_equal(attend(), expected)
    finally:
        done.set()
        thread.join()


def test_a_forked_child_forgets_its_parents(run_python):
    done = run_python(IN_A_FORKED_CHILD)
    assert done.returncode == 0, done.stderr
