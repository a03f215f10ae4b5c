"""MLX's kernels for short queries agree with float64: a shim that runs these can be trusted with ours."""

import numpy as np
import pytest
from attention64 import DTYPES, TOLERANCE, attention64, draw, encode, relative_error
from mlx_kernels import sdpa_vector, sdpa_vector_2pass

SCHEDULES = ("forward", "reverse", "greedy", "random:1")


def check(kernel, dtype, operands, **options):
    scale = operands[0].shape[-1] ** -0.5
    asked = {name: option for name, option in options.items() if name in ("causal", "mask", "sinks")}
    out, _ = kernel(*operands, scale, **options)
    assert relative_error(out, attention64(*operands, scale, **asked)[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "key_len", "dim", "causal"),
    [(4, 2, 1, 77, 64, False), (2, 1, 3, 100, 128, True), (1, 1, 1, 32, 64, False), (2, 2, 5, 5, 64, True)],
)
def test_one_pass(rng, dtype, heads, kv_heads, length, key_len, dim, causal):
    shape = {"heads": heads, "kv_heads": kv_heads, "length": length, "key_len": key_len, "dim": dim}
    check(sdpa_vector, dtype, draw(rng, dtype, **shape), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("kernel", [sdpa_vector, sdpa_vector_2pass])
def test_masks(rng, dtype, kind, kernel):
    operands = draw(rng, dtype, batch=2, heads=4, kv_heads=1, length=2, key_len=45, dim=64)
    shape = (2, 4, 2, 45)
    mask = rng.random(shape) < 0.7 if kind == "bool" else encode(rng.standard_normal(shape), dtype)
    check(kernel, dtype, operands, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [sdpa_vector, sdpa_vector_2pass])
def test_sinks(rng, dtype, kernel):
    operands = draw(rng, dtype, heads=2, kv_heads=2, length=1, key_len=64, dim=64)
    check(kernel, dtype, operands, sinks=encode(rng.standard_normal(2), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "key_len", "dim", "causal"),
    [(1, 4, 2, 2, 301, 64, True), (2, 4, 4, 1, 130, 128, False), (1, 2, 1, 1, 9, 64, False)],
)
def test_two_passes(rng, dtype, batch, heads, kv_heads, length, key_len, dim, causal):
    shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "key_len": key_len, "dim": dim}
    check(sdpa_vector_2pass, dtype, draw(rng, dtype, **shape), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_passes_for_eight_heads_of_a_key_head(rng, dtype):
    operands = draw(rng, dtype, heads=16, kv_heads=2, length=1, key_len=301, dim=64)
    check(sdpa_vector_2pass, dtype, operands, gqa=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_change_nothing(rng, schedule):
    operands = draw(np.random.default_rng(0), "float", heads=2, kv_heads=1, length=2, key_len=77, dim=64)
    for kernel in (sdpa_vector, sdpa_vector_2pass):
        first, counts = kernel(*operands, 0.125)
        out, same_counts = kernel(*operands, 0.125, schedule=schedule)
        np.testing.assert_array_equal(out, first)
        assert same_counts == counts
