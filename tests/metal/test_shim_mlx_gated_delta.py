"""MLX's gated delta kernels agree with float64: the chunked one addresses matrix elements by Apple's lane layout."""

import numpy as np
import pytest
from attention64 import TOLERANCE, relative_error
from mlx_kernels import gated_delta

LENGTH, KEY_HEADS, VALUE_HEADS, DIM = 21, 2, 4, 64


def draw(rng):
    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    query, key = normal(1, LENGTH, KEY_HEADS, DIM) * 0.2, normal(1, LENGTH, KEY_HEADS, DIM) / 8
    value, state = normal(1, LENGTH, VALUE_HEADS, DIM), normal(1, VALUE_HEADS, DIM, DIM) * 0.3
    decay = rng.uniform(0.7, 1, (1, LENGTH, VALUE_HEADS)).astype(np.float32)
    beta = rng.uniform(0.2, 1, (1, LENGTH, VALUE_HEADS)).astype(np.float32)
    return [each.astype(np.float32) for each in (query, key, value, state, decay, beta)]


def gated_delta64(query, key, value, state, decay, beta):
    state = state[0].astype(np.float64)
    out = np.zeros((LENGTH, VALUE_HEADS, DIM))
    for step in range(LENGTH):
        for head in range(VALUE_HEADS):
            key_row, query_row = (each[0, step, head // 2].astype(np.float64) for each in (key, query))
            state[head] *= decay[0, step, head]
            difference = (value[0, step, head] - state[head] @ key_row) * beta[0, step, head]
            state[head] += np.outer(difference, key_row)
            out[step, head] = state[head] @ query_row
    return out[None], state[None]


@pytest.mark.parametrize("chunked", [False, True])
def test_recurrence(rng, chunked):
    operands = draw(rng)
    results = gated_delta(*operands, chunked=chunked)
    for result, expected in zip(results, gated_delta64(*operands), strict=True):
        assert relative_error(result, expected) < TOLERANCE["float"]


def test_wrong_lane_layout_is_noticed(rng):
    operands = draw(rng)
    out, _ = gated_delta(*operands, chunked=True, defines=("MSL_WRONG_LANE_LAYOUT",))
    assert not relative_error(out, gated_delta64(*operands)[0]) < 0.1
