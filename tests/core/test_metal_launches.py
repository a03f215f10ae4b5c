"""What a call would run on Metal, as plain data: inputs in their own memory, through their own strides."""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core import NoKernelError, _ext

QUERY, KEY, VALUE, OUT, LSE, PARAMS = range(6)
SINKS, PARTIAL_OUT, PARTIAL_MAX, PARTIAL_SUM = 11, 13, 14, 15


def launches(query, key, value, *, sinks=None, kernel="auto"):
    return _ext.metal_launches(_ext.Arguments(query, key, value, sinks=sinks, kernel=kernel))


VIEWS = {
    "dense": lambda a: a,
    "transposed": lambda a: mx.swapaxes(mx.contiguous(mx.swapaxes(a, 1, 2)), 1, 2),
    "part": lambda a: mx.concatenate([a * 0, a, a * 0], axis=2)[:, :, a.shape[2] : 2 * a.shape[2]],
    "backwards": lambda a: mx.as_strided(a, a.shape, (0, -80, -8, 1), a.size - 8),
    "broadcast": lambda a: mx.broadcast_to(a[:, :, :1], a.shape),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_of_inputs(rng, view):
    key = view(mx.array(rng.standard_normal((1, 2, 10, 8)), mx.float32))
    mx.eval(key)
    (launch,) = launches(mx.zeros((1, 4, 20, 8)), key, key)
    memory, offset = launch["buffers"][KEY]
    # Strides are in AttentionParams; numpy has those of the array itself.
    strides = np.asarray(memoryview(key)).strides
    seen = np.ndarray(key.shape, np.float32, memory, offset, strides)
    np.testing.assert_array_equal(seen, np.array(key))


def test_outputs_and_structs():
    (launch,) = launches(mx.zeros((2, 4, 20, 8), mx.float16), *[mx.zeros((2, 2, 10, 8), mx.float16)] * 2)
    assert launch["buffers"].keys() == {QUERY, KEY, VALUE, OUT, LSE, PARAMS}
    assert launch["buffers"][OUT] == 2 * 4 * 20 * 8 * 2
    assert launch["buffers"][LSE] == 2 * 4 * 20 * 4
    assert isinstance(launch["buffers"][PARAMS], bytes)
    assert launch["partial_rows"] == 0


def test_scratch():
    first, second = launches(mx.zeros((1, 4, 2, 8)), *[mx.zeros((1, 2, 1000, 8))] * 2, kernel="metal_decode_split")
    _, _, chunks = first["split"]
    assert first["partial_rows"] == second["partial_rows"] == 4 * 2 * chunks
    for launch in (first, second):
        assert launch["buffers"][PARTIAL_OUT] == launch["partial_rows"] * 8 * 4
        assert launch["buffers"][PARTIAL_MAX] == launch["buffers"][PARTIAL_SUM] == launch["partial_rows"] * 4


def test_source_ends_with_the_instantiation():
    (launch,) = launches(mx.zeros((1, 4, 20, 8)), *[mx.zeros((1, 2, 10, 8))] * 2)
    assert launch["source"].isascii()
    assert f'[[host_name("{launch["function"]}")]]' in launch["source"].splitlines()[-1]


def test_inputs_are_cast_as_for_the_cpu():
    query, key = mx.zeros((1, 4, 20, 8), mx.float16), mx.zeros((1, 2, 10, 8), mx.float16)
    (launch,) = launches(query, key, key, sinks=mx.array([1, 2, 3, 4], mx.float16))
    assert launch["buffers"][SINKS] == (np.array([1, 2, 3, 4], np.float32).tobytes(), 0)


def test_raises_as_a_call_does():
    key = mx.zeros((1, 2, 10, 8))
    with pytest.raises(NoKernelError, match="cpu_prefill runs on the CPU, the stream does not"):
        launches(mx.zeros((1, 4, 20, 8)), key, key, kernel="cpu_prefill")
    with pytest.raises(ValueError, match="key has 2 heads, which does not divide query's 3"):
        launches(mx.zeros((1, 3, 20, 8)), key, key)
