"""half, bfloat and float: conversions, rounding after each operation, and the functions, against numpy."""

import numpy as np
import pytest
from attention64 import decode, encode
from metal_on_cpu import from_bfloat16, to_bfloat16
from small_kernels import launcher

NUMPY = {"float": np.float32, "half": np.float16, "bfloat": np.uint16}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 6e-8, 65504, 65520, 3.38e38, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-9]


def compute(dtype, expression, *operands, result=None, expressions=()):
    """expression of x (and y, z), element by element, in this type; compiled together with the other expressions."""
    names = "xyz"[: len(operands)]
    result = result or dtype
    arguments = ", ".join(f"device const {dtype}* {name}s [[buffer({i})]]" for i, name in enumerate(names))
    arguments += f", device {result}* out [[buffer(9)]], constant int& n [[buffer(10)]]"
    values = " ".join(f"{dtype} {name} = {name}s[i];" for name in names)
    body = f"typedef {dtype} T; for (int i = thread_index; i < n; i += 32) {{{{ {values} out[i] = {{}}; }}}}"
    run = launcher(arguments, [body.format(each) for each in (*expressions, expression)], body.format(expression))
    buffers = dict(enumerate(operands)) | {9: np.zeros(len(operands[0]), NUMPY[result]), 10: np.int32(len(operands[0]))}
    return run(grid=(1, 1, 1), threadgroup=(32, 1, 1), buffers=buffers, outputs={9}).buffers[9]


def test_bfloat16_rounds_to_nearest_even():
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5, np.inf, 3.4e38], np.float32)
    expected = [1, 1, 1 + 2**-6, 1 + 2**-7, -2.5, np.inf, np.inf]
    np.testing.assert_array_equal(from_bfloat16(to_bfloat16(values)), expected)
    assert np.isnan(from_bfloat16(to_bfloat16(np.array([np.nan], np.float32)))).all()


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


OPERATORS = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_arithmetic_rounds_once(rng, dtype, operator):
    x, y = (encode(rng.standard_normal(500), dtype) for _ in range(2))
    exact = OPERATORS[operator](decode(x), decode(y))
    expected = encode(exact, "float") if dtype == "float" else encode(encode(exact, "float"), dtype)
    np.testing.assert_array_equal(
        compute(dtype, f"x {operator} y", x, y, expressions=[f"x {each} y" for each in OPERATORS]), expected
    )


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
    "log2(fabs(x))": lambda x: np.log2(np.abs(x)),
    "tanh(x)": np.tanh,
    "sin(x)": np.sin,
    "cos(x)": np.cos,
    "sqrt(abs(x))": lambda x: np.sqrt(np.abs(x)),
    "rsqrt(abs(x))": lambda x: 1 / np.sqrt(np.abs(x)),
    "floor(x)": np.floor,
    "ceil(x)": np.ceil,
    "rint(x)": np.rint,
    "trunc(x)": np.trunc,
    "sign(x)": np.sign,
    "clamp(x, (T)-0.5f, (T)0.5f)": lambda x: np.clip(x, -0.5, 0.5),
    "saturate(x)": lambda x: np.clip(x, 0, 1),
    "fma(x, x, x)": lambda x: x * x + x,
    "select(x, (T)1, x > (T)0)": lambda x: np.where(x > 0, 1, x),
}


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
@pytest.mark.parametrize("expression", FUNCTIONS)
def test_function(rng, dtype, expression):
    x = encode(rng.standard_normal(300) * 3, dtype)
    result = decode(compute(dtype, expression, x, expressions=FUNCTIONS))
    tolerance = {"float": 1e-6, "half": 2**-10, "bfloat": 2**-7}[dtype]
    np.testing.assert_allclose(result, FUNCTIONS[expression](decode(x)), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("namespace", ["fast", "precise", "metal"])
def test_namespaces(rng, namespace):
    x = encode(rng.standard_normal(100), "float")
    np.testing.assert_allclose(compute("float", f"{namespace}::exp(x)", x), np.exp(x), rtol=1e-6)
    np.testing.assert_allclose(compute("float", f"{namespace}::pow(abs(x), 2.5f)", x), np.abs(x) ** 2.5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float", "half", "bfloat"])
def test_nan_loses_against_numbers(dtype):
    x = encode(np.array([np.nan, 1, np.nan, 2]), dtype)
    y = encode(np.array([3, np.nan, np.nan, 1]), dtype)
    np.testing.assert_array_equal(decode(compute(dtype, "max(x, y)", x, y)), [3, 1, np.nan, 2])
    np.testing.assert_array_equal(decode(compute(dtype, "min(x, y)", x, y)), [3, 1, np.nan, 1])


def test_limits():
    x = np.zeros(1, np.float32)
    limits = {
        "numeric_limits<float>::max()": np.finfo(np.float32).max,
        "numeric_limits<half>::max()": 65504,
        "numeric_limits<float>::infinity()": np.inf,
        "numeric_limits<half>::epsilon()": 2**-10,
        "numeric_limits<short>::min()": -32768,
        "numeric_limits<bfloat>::epsilon()": 2**-7,
        "INFINITY": np.inf,
        "M_LOG2E_F": np.float32(np.log2(np.e)),
    }
    for expression, expected in limits.items():
        assert compute("float", expression, x, expressions=limits)[0] == expected, expression
