"""half and bfloat are converted as in MLX, and rounded after each operation. min and max prefer a number to a NaN."""

import mlx.core as mx
import numpy as np
import pytest

from tests.emulators.small_kernels import run
from tests.metal.metal_attention import as_numpy, to_mlx

TYPES = {"half": mx.float16, "bfloat": mx.bfloat16}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, 6e-8, 65504, 65520, 3.38e38, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-9, 1e-45]


def compute(type_, expression, *operands):
    """Computes an expression of x (and y, z) for each element, in the type `type_`."""
    arrays = [as_numpy(operand) for operand in operands]
    arguments = f"device {type_}* out [[buffer(0)]], constant int& n [[buffer(1)]]"
    values = ""
    for index, (name, _) in enumerate(zip("xyz", operands, strict=False), start=2):
        arguments += f", device const {type_}* {name}s [[buffer({index})]]"
        values += f"{type_} {name} = {name}s[i]; "
    body = f"for (int i = thread_index; i < n; i += 32) {{ {values} out[i] = {expression}; }}"
    buffers = {0: np.zeros_like(arrays[0]), 1: np.int32(arrays[0].size)}
    done = run(body, arguments, buffers | dict(enumerate(arrays, start=2)), threads=32)
    return to_mlx(done.buffers[0], operands[0].dtype)


@pytest.mark.parametrize("type_", TYPES)
def test_conversion_from_float(rng, type_):
    numbers = np.concatenate([SPECIAL, rng.standard_normal(1000) * 10.0 ** rng.integers(-8, 8, 1000)])
    values = mx.array(numbers.astype(np.float32))
    rounded = compute("float", f"float({type_}(x))", values)
    assert mx.array_equal(rounded, values.astype(TYPES[type_]).astype(mx.float32))


@pytest.mark.parametrize("type_", TYPES)
def test_every_operation_rounds(rng, type_):
    """The product x * y must be rounded before z is added."""
    x, y, z = (mx.array(rng.standard_normal(500)).astype(TYPES[type_]) for _ in range(3))
    wide = lambda a: a.astype(mx.float32)  # noqa: E731
    product = (wide(x) * wide(y)).astype(TYPES[type_])
    assert mx.array_equal(compute(type_, "x * y + z", x, y, z), (wide(product) + wide(z)).astype(TYPES[type_]))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("max(x, y)", [3, 1, np.nan, 2]), ("min(x, y)", [3, 1, np.nan, 1]), ("clamp(x, y, y)", [3, 1, np.nan, 1])],
)
def test_nan_loses_against_numbers(expression, expected):
    x, y = mx.array([np.nan, 1, np.nan, 2]), mx.array([3, np.nan, np.nan, 1])
    np.testing.assert_array_equal(compute("float", expression, x, y), np.float32(expected))
