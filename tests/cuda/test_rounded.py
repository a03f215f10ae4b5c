"""With precision="input", CUDA's kernels for many queries round P to 16 bits. Gradient kernels also round dS."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import pytest
from flashattn_core.reference import reference_attention

from tests import launches
from tests.core.gradient_oracle import draw_call, unfused_gradients
from tests.core.oracle import assert_matches_reference, assert_same_bits, draw, roundings, to_numpy
from tests.core.test_quantised import dequantised
from tests.cuda.cuda_attention import flash_attention, run_backward
from tests.promises import promise

pytestmark = [pytest.mark.rotate(4), pytest.mark.usefixtures("requires_clang")]

KERNELS = ["cuda_prefill", "cuda_prefill_hopper"]
FORMS = ("", "_rounded")
CAPABILITIES = [80, 90]
DTYPES = ["float16", "bfloat16"]
GRADIENTS = ("dq", "dk", "dv")


def is_exact(error: float) -> bool:
    return error <= 1.02


def is_rounded_once(error: float) -> bool:
    return 1.05 < error < 1.5


def gradients(call, capability: int, precision: str):
    with launches.shared_memory(227, capability):
        return run_backward(call, precision=precision)


def errors_of_gradients(rng, capability: int, precision: str, dtype: str) -> list[float]:
    call = draw_call(rng, heads=2, kv_heads=2, length=130, key_len=190, dim=64, dtype=dtype)
    exact = unfused_gradients(call)
    got = gradients(call, capability, precision)
    return [roundings(getattr(got, name), getattr(exact, name)) for name in GRADIENTS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_error_is_that_of_one_rounding(rng, kernel, dtype):
    arrays = draw(rng, length=100, key_len=200, dim=64, dtype=dtype)
    exact, _ = reference_attention(*map(to_numpy, arrays), None, None)
    error = {form: roundings(flash_attention(*arrays, kernel=kernel + form), exact) for form in FORMS}
    assert is_exact(error[""])
    assert is_rounded_once(error["_rounded"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bits", [3, 8])
def test_quantised_keys_and_values_are_rounded_once_too(rng, bits, kernel, dtype):
    query, *stored = draw(rng, length=100, key_len=200, dim=64, dtype=dtype)
    stored = [mx.quantize(x, bits=bits) for x in stored]
    exact, _ = reference_attention(to_numpy(query), *(to_numpy(dequantised(x, 64, bits)) for x in stored), None, None)
    error = {form: roundings(flash_attention(query, *stored, bits=bits, kernel=kernel + form), exact) for form in FORMS}
    assert is_exact(error[""])
    assert 1.5 < error["_rounded"] < 2.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("length", [100, 300])  # fewer queries than a kernel's block has, and more
@pytest.mark.parametrize(("dim", "small_blocks"), [(64, False), (64, True), (128, False), (128, True)])
def test_the_rule_of_every_kernel_holds(rng, dim, small_blocks, length, mask, kernel, dtype):
    arrays = draw(rng, length=length, key_len=length + 100, dim=dim, dtype=dtype)
    attention = partial(flash_attention, small_blocks=small_blocks)
    assert_matches_reference(*arrays, mask=mask, kernel=f"{kernel}_rounded", attention=attention)


def test_small_blocks_have_longer_tiles(rng):
    arrays = draw(rng, length=300, key_len=400, dim=128, dtype="bfloat16")
    attention = partial(flash_attention, *arrays, kernel="cuda_prefill_hopper_rounded")
    assert not mx.array_equal(attention(small_blocks=False), attention(small_blocks=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_error_of_gradients_is_that_of_one_rounding(rng, capability, dtype):
    assert all(map(is_exact, errors_of_gradients(rng, capability, "float32", dtype)))
    assert all(map(is_rounded_once, errors_of_gradients(rng, capability, "input", dtype)))


@promise('on CUDA the errors of 16-bit gradients in precision="input" have bounds')
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gradients_of_peaked_rows(rng, capability, dtype):
    """Where one key has nearly all of a row's weight, dP and delta nearly cancel.

    With precision="input", delta comes from the rounded `out`.
    """
    call = replace(draw_call(rng, length=130, key_len=190, dim=64, dtype=dtype), scale=2.0)
    exact = unfused_gradients(call)
    for precision, is_right in (("float32", is_exact), ("input", lambda error: 2 < error < 5)):
        got = gradients(call, capability, precision)
        assert all(is_right(roundings(getattr(got, name), getattr(exact, name))) for name in ("dq", "dk"))


SAME = {
    "float32": ("cuda_prefill", 40, "float32", None),
    "float32 on Hopper": ("cuda_prefill_hopper", 40, "float32", None),
    "quantised keys, few queries": ("cuda_decode", 3, "float16", 4),
    "few queries": ("cuda_decode", 3, "bfloat16", None),
    "a thread a score": ("cuda_rowwise", 20, "bfloat16", None),
}


@pytest.mark.parametrize("name", SAME)
def test_all_other_calls_have_the_same_bits(rng, name):
    kernel, length, dtype, bits = SAME[name]
    query, *stored = draw(rng, length=length, key_len=70, dim=64, dtype=dtype)
    stored = [mx.quantize(x, bits=bits) for x in stored] if bits else stored
    by_float32, by_input = (
        flash_attention(query, *stored, mask="causal", bits=bits, kernel=form) for form in (kernel, f"{kernel}_rounded")
    )
    assert_same_bits(by_input, by_float32)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gradients_in_float32_have_the_same_bits(rng, capability):
    call = replace(draw_call(rng, heads=4, length=40, key_len=50, dim=64), mask="causal")
    by_float32, by_input = (gradients(call, capability, precision) for precision in ("float32", "input"))
    for name in GRADIENTS:
        assert_same_bits(getattr(by_input, name), getattr(by_float32, name))
