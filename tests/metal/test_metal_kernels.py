"""Each kernel's error is within oracle.py's bound, for all dtypes, masks and options, and groups of 1, 2 and 7 heads.

Lengths lie below, at and above the size of each tile. Each call takes the next mask, options, lengths and schedule, so
that each kernel runs with all of them. The emulator checks every run for races, bounds and uninitialised memory.
"""

import mlx.core as mx
import numpy as np
import pytest
from flashattn_core.reference import reference_attention

from tests.core.oracle import assert_matches_reference, assert_same_bits, draw, to_numpy
from tests.core.test_grid import MASK_KINDS, in_dtype, mask_kinds, option_kinds
from tests.metal.metal_attention import flash_attention, run
from tests.promises import promise

SCHEDULES = ["forward", "reverse", "greedy", "random:1", "random:2"]

ONE = [(1, n) for n in (1, 2, 3, 4, 5, 31, 32, 33, 63, 127, 128, 129, 131, 257)]
FEW = [(1, 63), (1, 64), (1, 65), (2, 2), (3, 129), (5, 4), (7, 7), (8, 3), (8, 200), (4, 256), (1, 1), (6, 61)]
SHORT = [(1, 1), (2, 31), (4, 32), (5, 33), (8, 8), (9, 7), (16, 65), (17, 16), (23, 64), (33, 40), (3, 95), (11, 97)]
LONG = [(1, 1), (7, 33), (31, 31), (32, 32), (33, 64), (63, 65)]
LONG += [(64, 63), (65, 97), (64, 1), (66, 32), (97, 31), (8, 96)]
# More lengths for metal_prefill_reg, which has other tiles for many queries.
LONGER = [(65, 65), (66, 127), (127, 64), (128, 128), (129, 33), (80, 16), (96, 15), (72, 17)]

CASES = {
    "metal_decode_fast": ONE,
    "metal_decode_parallel": ONE,
    "metal_decode_split": FEW,
    "metal_prefill_tg": SHORT,
    "metal_prefill_reg": LONG + LONGER,
    "metal_rowwise": LONG,
}


@pytest.mark.rotate(27)
@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kernel", CASES)
def test_grid(rng, kernel, dtype, group):
    turn = 5 * group + len(dtype)
    for i, (length, key_len) in enumerate(CASES[kernel]):
        sizes = {"length": length, "key_len": key_len, "dim": (64, 40)[i % 2]}
        query, key, value = draw(rng, batch=(2,), heads=group, kv_heads=1, dtype=dtype, **sizes)
        mask = mask_kinds(rng, length, key_len)[(turn + i) % MASK_KINDS]()
        options = option_kinds(rng, group)[(turn + 3 * i) % 8]
        how = {"kernel": kernel, "attention": flash_attention, "schedule": SCHEDULES[(turn + i) % len(SCHEDULES)]}
        assert_matches_reference(query, key, value, **in_dtype(query.dtype, mask, options), **how)


HEAD_DIMS = [(1, 1), (5, 7), (80, 96), (128, 128), (192, 128), (64, 200), (256, 256), (33, 8)]
ABOVE_256 = [(512, 512), (300, 20), (16, 400)]


def kernels_and_dims(kernels, up_to_256, above):
    """Returns pairs of a kernel and head_dims. Prefill kernels take a head_dim up to 256 only."""
    cases = [(kernel, dims) for kernel in kernels for dims in up_to_256]
    return cases + [(kernel, dims) for kernel in kernels if "prefill" not in kernel for dims in above]


@pytest.mark.rotate(18)
@pytest.mark.parametrize(
    ("kernel", "dims"),
    kernels_and_dims(CASES, HEAD_DIMS, ABOVE_256)
    + [("metal_prefill_reg", dims) for dims in [(96, 96), (128, 64), (256, 40)]],
    ids=str,
)
def test_head_dims(rng, kernel, dims):
    # metal_prefill_reg has other tiles for many queries, so it also runs with 66 queries.
    lengths = [CASES[kernel][5], (66, 65)] if kernel == "metal_prefill_reg" else [CASES[kernel][5]]
    for length, key_len in lengths:
        for dtype in ("float32", "bfloat16"):
            sizes = {"length": length, "key_len": key_len, "dim": dims[0], "value_dim": dims[1]}
            query, key, value = draw(rng, heads=4, dtype=dtype, **sizes)
            assert_matches_reference(query, key, value, mask="causal", kernel=kernel, attention=flash_attention)


def assert_exact_out(rng, run, kernel, length, key_len, dtype="bfloat16", dim=64, value_dim=64) -> None:
    """exact_out, which traced calls save for their gradient, is `out` before it is rounded."""
    query, key, value = draw(rng, heads=4, length=length, key_len=key_len, dim=dim, value_dim=value_dim, dtype=dtype)
    hidden = mx.arange(key_len) == key_len // 2
    poisoned = [mx.where(hidden[:, None], mx.nan, x).astype(x.dtype) for x in (key, value)]
    for mask, stored in (("causal", (key, value)), (~hidden, poisoned)):
        got = run(query, *stored, mask=mask, kernel=kernel, exact_out=True)
        exact, _ = reference_attention(*map(to_numpy, (query, *stored)), None, mask)
        np.testing.assert_allclose(np.asarray(got.exact_out), exact, rtol=0, atol=1e-5)
        assert_same_bits(got.out, got.exact_out)


@pytest.mark.rotate(2)
@pytest.mark.parametrize(("dtype", "value_dim"), [("float16", 64), ("bfloat16", 40)])
@pytest.mark.parametrize("kernel", CASES)
def test_exact_out(rng, kernel, dtype, value_dim):
    assert_exact_out(rng, run, kernel, *CASES[kernel][-1], dtype, value_dim=value_dim)


# --- Plain and quantised keys and values ------------------------------------------------------------------

QUANTISED = [kernel for kernel in CASES if kernel != "metal_prefill_tg"]


def operands(rng, heads, length, key_len, dim=64, bits=None):
    """Returns (query, key, value) for the kernel, quantised if `bits` is given, and as float32 for the reference."""
    query, key, value = draw(rng, heads=heads, kv_heads=1, length=length, key_len=key_len, dim=dim)
    if bits is None:
        return (query, key, value), (query, key, value)
    packed = [mx.quantize(x, bits=bits) for x in (key, value)]
    return (query, *packed), (query, *(mx.dequantize(*each, bits=bits) for each in packed))


@promise("in float32 each of Metal's kernels is within 2e-6 of float64")
@pytest.mark.rotate(6)
@pytest.mark.parametrize(
    ("kernel", "dim", "bits"),
    [*((kernel, dim, None) for kernel in CASES for dim in (64, 128)), *((k, 64, b) for k in QUANTISED for b in (4, 8))],
)
def test_float32_is_within_2e_6_of_float64(rng, kernel, dim, bits):
    for length, key_len in CASES[kernel][-4:]:
        arrays, floats = operands(rng, 2, length, key_len, dim, bits)
        result = run(*arrays, mask="causal", kernel=kernel, bits=bits)
        out, lse = reference_attention(*map(to_numpy, floats), None, "causal")
        np.testing.assert_allclose(to_numpy(result.out), out, rtol=0, atol=2e-6)
        np.testing.assert_allclose(to_numpy(result.lse), lse, rtol=2e-6, atol=2e-6)


@pytest.mark.rotate(5)
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("length", "group"), [(8, 33), (3, 100), (8, 8)])
def test_more_rows_than_a_threadgroup_holds(rng, length, group, bits):
    arrays, floats = operands(rng, group, length, 70, bits=bits)

    def attention(_query, _key, _value, *args, **options):
        return flash_attention(*arrays, *args, bits=bits, **options)

    assert_matches_reference(*floats, mask="causal", kernel="metal_decode_split", attention=attention)


@promise("on Metal every schedule gives the same bits")
@pytest.mark.rotate(6)
@pytest.mark.parametrize(("kernel", "bits"), [*((kernel, None) for kernel in CASES), *((k, 6) for k in QUANTISED)])
def test_the_schedule_changes_no_bit(rng, kernel, bits):
    arrays, _ = operands(rng, 7, *CASES[kernel][7], bits=bits)
    first = run(*arrays, mask="causal", kernel=kernel, bits=bits)
    for schedule in SCHEDULES[1:]:
        other = run(*arrays, mask="causal", kernel=kernel, bits=bits, schedule=schedule)
        assert mx.array_equal(first.out, other.out)
        assert mx.array_equal(first.lse, other.lse)
        assert first.counts == other.counts
