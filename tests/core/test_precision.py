"""On the CPU each `precision` gives the same bits, since no CPU kernel rounds probabilities."""

import mlx.core as mx
import pytest
from flashattn_core import flash_attention
from hypothesis import given

from tests.core.oracle import DTYPES, assert_same_bits, draw
from tests.core.strategies import cases
from tests.promises import promise


@promise("on the CPU both precisions give the same bits")
@given(cases() | cases(quantised=True))
def test_the_same_bits(case):
    by_default = case.run()
    for precision in ("float32", "input"):
        case.made_of["precision"] = lambda arrays, precision=precision: precision
        for got, expected in zip(case.run(), by_default, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_of_gradients(rng, dtype):
    arrays = draw(rng, heads=4, length=40, key_len=50, dim=24, dtype=dtype)

    def gradients(precision):
        loss = lambda *x: flash_attention(*x, mask="causal", precision=precision).sum()  # noqa: E731
        return mx.grad(loss, argnums=(0, 1, 2))(*arrays)

    for by_input, by_float32 in zip(gradients("input"), gradients("float32"), strict=True):
        assert_same_bits(by_input, by_float32)
