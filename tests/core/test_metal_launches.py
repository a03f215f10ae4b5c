"""What a call would run on Metal, as plain data: inputs in their own memory, through their own strides."""

import launches
import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.attention import lowered


def forward(query, key, value, **options):
    return launches.forward(lowered(query, key, value, **options))


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
    (launch,) = forward(mx.zeros((1, 4, 20, 8)), key, key)
    memory, offset = launch["buffers"]["key"]
    # Strides are in AttentionParams; numpy has those of the array itself.
    strides = np.asarray(memoryview(key)).strides
    seen = np.ndarray(key.shape, np.float32, memory, offset, strides)
    np.testing.assert_array_equal(seen, np.array(key))


def test_outputs_and_structs():
    (launch,) = forward(mx.zeros((2, 4, 20, 8), mx.float16), *[mx.zeros((2, 2, 10, 8), mx.float16)] * 2)
    assert launch["buffers"].keys() == {"query", "key", "value", "out", "lse", "row_stats", "params"}
    assert launch["buffers"]["out"] == 2 * 4 * 20 * 8 * 2
    assert launch["buffers"]["lse"] == 2 * 4 * 20 * 4
    assert launch["buffers"]["row_stats"] == 2 * 4 * 20 * 2 * 4
    assert isinstance(launch["buffers"]["params"], bytes)


def test_scratch():
    first, second = forward(mx.zeros((1, 4, 2, 8)), *[mx.zeros((1, 2, 1000, 8))] * 2, kernel="metal_decode_split")
    _, _, chunks = first["split"]
    for launch in (first, second):
        assert launch["buffers"]["partial_out"] == 4 * 2 * chunks * 8 * 4
        assert launch["buffers"]["partial_max"] == launch["buffers"]["partial_sum"] == 4 * 2 * chunks * 4
