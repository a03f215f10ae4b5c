"""MLX's softmax kernels agree with float64."""

import numpy as np
import pytest
from attention64 import DTYPES, TOLERANCE, decode, encode, relative_error
from mlx_kernels import softmax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [100, 1000, 4096])
@pytest.mark.parametrize("looped", [False, True])
def test_rows(rng, dtype, length, looped):
    values = encode(rng.standard_normal((3, length)), dtype)
    expected = np.exp(decode(values))
    expected /= expected.sum(axis=-1, keepdims=True)
    out, counts = softmax(values, looped=looped)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert counts.device_written == values.nbytes
