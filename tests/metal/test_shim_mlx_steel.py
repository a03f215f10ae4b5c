"""MLX's kernel for long queries agrees with float64: 8x8 matrices, ragged tiles, masks."""

import numpy as np
import pytest
from attention64 import DTYPES, TOLERANCE, attention64, draw, encode, relative_error
from mlx_kernels import steel_attention


def check(dtype, operands, **options):
    scale = operands[0].shape[-1] ** -0.5
    asked = {name: option for name, option in options.items() if name in ("causal", "mask", "sinks")}
    out, _, lse = steel_attention(*operands, scale, lse=True, **options)
    expected, expected_lse = attention64(*operands, scale, **asked)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert relative_error(lse, expected_lse) < TOLERANCE["float"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "key_len", "dim", "causal"),
    [
        (1, 2, 1, 64, 64, 64, False),
        (1, 2, 1, 50, 77, 64, True),
        (2, 2, 2, 40, 45, 128, False),
        (1, 1, 1, 64, 64, 128, True),
        (1, 1, 1, 33, 31, 64, False),
    ],
)
def test_shapes(rng, dtype, batch, heads, kv_heads, length, key_len, dim, causal):
    shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "key_len": key_len, "dim": dim}
    check(dtype, draw(rng, dtype, **shape), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_masks(rng, dtype, kind):
    operands = draw(rng, dtype, heads=2, kv_heads=2, length=37, key_len=70, dim=64)
    shape = (1, 2, 37, 70)
    mask = rng.random(shape) < 0.7 if kind == "bool" else encode(rng.standard_normal(shape), dtype)
    check(dtype, operands, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(rng, dtype):
    operands = draw(rng, dtype, heads=2, kv_heads=2, length=37, key_len=70, dim=64)
    check(dtype, operands, sinks=encode(rng.standard_normal(2), dtype))


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_query_in_registers(rng, dtype):
    """Two SIMD groups share the rows (WN = 2), exchange halves of the scores, and multiply in the inputs' type."""
    operands = draw(rng, dtype, heads=2, kv_heads=1, length=50, key_len=77, dim=128)
    out, counts = steel_attention(*operands, 128**-0.5, causal=True, block_k=32, wn=2)
    assert relative_error(out, attention64(*operands, 128**-0.5, causal=True)[0]) < TOLERANCE[dtype]
    assert set(counts.mma) == {dtype, f"float*{dtype}"}


@pytest.mark.parametrize("schedule", ["reverse", "greedy", "random:1"])
def test_schedules_change_nothing(schedule):
    operands = draw(np.random.default_rng(0), "float", heads=2, kv_heads=1, length=50, key_len=77, dim=64)
    first, counts = steel_attention(*operands, 0.125)
    out, same_counts = steel_attention(*operands, 0.125, schedule=schedule)
    np.testing.assert_array_equal(out, first)
    assert same_counts == counts
