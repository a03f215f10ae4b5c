"""half, bfloat and float: conversions, rounding after each operation, and the functions, against numpy."""

import numpy as np
import pytest
from attention64 import DTYPES, decode, encode
from metal_on_cpu import from_bfloat16, to_bfloat16
from small_kernels import run

NUMPY = {"float": np.float32, "half": np.float16, "bfloat": np.uint16}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 6e-8, 65504, 65520, 3.38e38, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-9]


def compute(dtype, expression, *operands, result=None, expressions=()):
    """expression of x (and y, z), element by element, in this type; compiled together with the other expressions."""
    result, count = result or dtype, len(operands[0])
    arguments = f"device {result}* out [[buffer(0)]], constant int& n [[buffer(1)]]"
    values, buffers = "", {0: np.zeros(count, NUMPY[result]), 1: np.int32(count)}
    for index, (name, operand) in enumerate(zip("xyz", operands, strict=False), start=2):
        arguments += f", device const {dtype}* {name}s [[buffer({index})]]"
        values += f"{dtype} {name} = {name}s[i]; "
        buffers[index] = operand
    body = f"for (int i = thread_index; i < n; i += 32) {{{{ {values} out[i] = {{}}; }}}}"
    together = [body.format(each) for each in expressions]
    return run(body.format(expression), arguments, buffers, together=together, threads=32).buffers[0]


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5, np.inf, 3.4e38, np.nan], np.float32)
    expected = [1, 1, 1 + 2**-6, 1 + 2**-7, -2.5, np.inf, np.inf, np.nan]
    np.testing.assert_array_equal(from_bfloat16(to_bfloat16(values)), expected)


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_conversion_from_float(rng, dtype):
    values = np.concatenate([SPECIAL, rng.standard_normal(1000) * 10.0 ** rng.integers(-8, 8, 1000)]).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = decode(encode(values, dtype))
    np.testing.assert_array_equal(decode(compute("float", f"{dtype}(x)", values, result=dtype)), expected)


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_conversion_to_float_is_exact(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits if dtype == "bfloat" else bits.view(np.float16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = decode(values).astype(np.float32)
    np.testing.assert_array_equal(compute(dtype, "float(x)", values, result="float"), expected)


OPERATORS = {"x + y": np.add, "x - y": np.subtract, "x * y": np.multiply, "x / y": np.divide}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expression", OPERATORS)
def test_arithmetic_rounds_once(rng, dtype, expression):
    x, y = (encode(rng.standard_normal(500), dtype) for _ in range(2))
    expected = encode(encode(OPERATORS[expression](decode(x), decode(y)), "float"), dtype)
    np.testing.assert_array_equal(compute(dtype, expression, x, y, expressions=OPERATORS), expected)


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_every_operation_rounds(rng, dtype):
    """No excess precision: (x * y) + z is not computed in float."""
    x, y, z = (encode(rng.standard_normal(500), dtype) for _ in range(3))
    product = encode(encode(decode(x) * decode(y), "float"), dtype)
    expected = encode(encode(decode(product) + decode(z), "float"), dtype)
    np.testing.assert_array_equal(compute(dtype, "x * y + z", x, y, z), expected)


FUNCTIONS = {
    "exp(x)": np.exp,
    "exp2(x)": np.exp2,
    "log(abs(x))": lambda x: np.log(np.abs(x)),
    "log2(abs(x))": lambda x: np.log2(np.abs(x)),
    "tanh(x)": np.tanh,
    "fast::exp(x)": np.exp,
    "precise::tanh(x)": np.tanh,
    "metal::exp2(x)": np.exp2,
    "fma(x, x, x)": lambda x: x * x + x,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expression", FUNCTIONS)
def test_function(rng, dtype, expression):
    x = encode(rng.standard_normal(300) * 3, dtype)
    result = decode(compute(dtype, expression, x, expressions=FUNCTIONS))
    tolerance = {"float": 1e-6, "half": 2**-10, "bfloat": 2**-7}[dtype]
    np.testing.assert_allclose(result, FUNCTIONS[expression](decode(x)), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_loses_against_numbers(dtype):
    x = encode(np.array([np.nan, 1, np.nan, 2]), dtype)
    y = encode(np.array([3, np.nan, np.nan, 1]), dtype)
    expected = {"max(x, y)": [3, 1, np.nan, 2], "min(x, y)": [3, 1, np.nan, 1], "clamp(x, y, y)": [3, 1, np.nan, 1]}
    for expression, values in expected.items():
        np.testing.assert_array_equal(decode(compute(dtype, expression, x, y, expressions=expected)), values)


def test_limits():
    limits = {
        "numeric_limits<float>::max()": np.finfo(np.float32).max,
        "numeric_limits<half>::max()": 65504,
        "numeric_limits<bfloat>::max()": from_bfloat16(np.array([0x7F7F], np.uint16))[0],
        "numeric_limits<float>::infinity()": np.inf,
        "INFINITY": np.inf,
        "M_LOG2E_F": np.float32(np.log2(np.e)),
    }
    for expression, expected in limits.items():
        assert compute("float", expression, np.zeros(1, np.float32), expressions=limits)[0] == expected, expression
