"""On a GPU, precision="input" adds at most the error of one rounding to a result.

It adds this error only in kernels that give probabilities to 16-bit tensor cores.
"""

from dataclasses import replace

import mlx.core as mx
import pytest
from flashattn_core import _ext, flash_attention, plan, quantized_flash_attention
from flashattn_core.arguments import lowered
from flashattn_core.reference import reference_attention

from tests.core.gradient_oracle import draw_call, unfused_gradients
from tests.core.oracle import assert_same_bits, draw, roundings, to_numpy
from tests.cuda.test_rounded import GRADIENTS, is_exact, is_rounded_once

pytestmark = pytest.mark.usefixtures("requires_gpu")

PRECISIONS = ("float32", "input")


def prefill(query, key, value, precision, small_blocks):
    variant = _ext.Variant(_ext.Kernel.cuda_prefill, precision == "input", small_blocks)
    call = lowered(query, key, value, mask="causal", precision=precision)
    return _ext.unchecked_attention(call, variant, False, None)


def unreadable(x):
    """Stores the rows in reverse order, which Hopper's version of the kernel cannot read. Another version then runs."""
    return mx.contiguous(x[..., ::-1, :])[..., ::-1, :]


@pytest.mark.parametrize("layout", [lambda x: x, unreadable], ids=["contiguous", "in reverse"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("small_blocks", [False, True])
def test_the_error_is_that_of_one_rounding(rng, small_blocks, dim, dtype, layout):
    query, key, value = draw(rng, heads=4, length=300, key_len=500, dim=dim, dtype=dtype)
    exact, _ = reference_attention(*map(to_numpy, (query, key, value)), None, "causal")
    by_float32, by_input = (
        roundings(prefill(query, layout(key), value, precision, small_blocks), exact) for precision in PRECISIONS
    )
    assert is_exact(by_float32)
    assert is_rounded_once(by_input)


def gradients(call, precision):
    def attend(query, key, value):
        return flash_attention(query, key, value, call.scale, return_lse=True, precision=precision)

    return mx.vjp(attend, [call.query, call.key, call.value], [call.dout, call.dlse])[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scale", [None, 2.0])  # with 2.0, one key has nearly all of a row's weight
def test_the_error_of_gradients(rng, scale, dim, dtype):
    """With precision="input", dq and dk of peaked rows have larger errors, because delta comes from the rounded out."""
    call = replace(draw_call(rng, heads=4, length=300, key_len=500, dim=dim, dtype=dtype), scale=scale)
    exact = unfused_gradients(call)
    got = [gradients(call, precision) for precision in PRECISIONS]
    for name, *both in zip(GRADIENTS, *got, strict=True):
        by_float32, by_input = (roundings(gradient, getattr(exact, name)) for gradient in both)
        assert is_exact(by_float32)
        if scale is None:
            assert 1.05 < by_input < 1.6


@pytest.mark.parametrize(("length", "dtype"), [(100, "float32"), (1, "bfloat16"), (16, "float16")])
def test_other_calls_have_the_same_bits(rng, length, dtype):
    arrays = draw(rng, heads=4, length=length, key_len=300, dim=64, dtype=dtype)
    by_float32, by_input = (flash_attention(*arrays, mask="causal", precision=precision) for precision in PRECISIONS)
    assert_same_bits(by_input, by_float32)
    assert plan(*arrays, mask="causal", precision="input").precision == "float32"


def test_quantised_keys_have_the_same_bits(rng):
    query, *stored = draw(rng, heads=4, length=100, key_len=300, dim=64, dtype="float16")
    stored = [mx.quantize(x, bits=4) for x in stored]
    by_float32, by_input = (quantized_flash_attention(query, *stored, bits=4, precision=how) for how in PRECISIONS)
    assert_same_bits(by_input, by_float32)


@pytest.mark.parametrize("shapeless", [False, True])
def test_a_compiled_function_keeps_the_precision(rng, shapeless):
    """A compiled function must keep the precision for other lengths than those it was traced with."""
    arrays = draw(rng, heads=4, length=300, key_len=500, dim=64, dtype="bfloat16")
    compiled = mx.compile(lambda *arrays: flash_attention(*arrays, precision="input"), shapeless=shapeless)
    mx.eval(compiled(*(x[:, :, :200] for x in arrays)))
    exact, _ = reference_attention(*map(to_numpy, arrays), None, None)
    assert is_rounded_once(roundings(compiled(*arrays), exact))
