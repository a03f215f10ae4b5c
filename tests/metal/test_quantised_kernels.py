"""Each kernel's results for quantised keys and values agree with float64, for all bits and group sizes.

Each call takes the next lengths, heads, dtypes, mask, options and schedule, as in test_metal_kernels.py. The emulator
checks every run for races, bounds and uninitialised memory.
"""

import mlx.core as mx
import pytest

from tests.core.oracle import DTYPES, assert_matches_reference
from tests.core.test_grid import MASK_KINDS, in_dtype, mask_kinds, option_kinds
from tests.core.test_quantised import BITS, GROUP_SIZES, dequantised, each_bits, normal, quantised
from tests.metal.metal_attention import run
from tests.metal.test_metal_kernels import CASES, QUANTISED, SCHEDULES, kernels_and_dims


def assert_matches(query, key, value, **call):
    """oracle.py bounds the error for float32 queries. 16-bit queries must give that float32 result, rounded once."""
    how = {name: call.pop(name) for name in ("group_size", "bits")}

    def attention(wide, _key, _value, *args, return_lse, **options):
        result = run(wide, key, value, *args, **how, **options)
        if query.dtype != mx.float32:
            narrow = run(query, key, value, *args, **how, **options)
            assert mx.array_equal(narrow.out, result.out.astype(query.dtype))
            assert mx.array_equal(narrow.lse, result.lse)
        return result.out, result.lse

    floats = dequantised(key, **how), dequantised(value, **how)
    assert_matches_reference(query.astype(mx.float32), *floats, attention=attention, **call)


@pytest.mark.rotate(53)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@each_bits
@pytest.mark.parametrize("kernel", QUANTISED)
def test_grid(rng, kernel, bits, group_size):
    how = {"group_size": group_size, "bits": bits}
    lengths = CASES[kernel]
    turn = BITS.index(bits) + 5 * GROUP_SIZES.index(group_size)
    for i in range(6):
        length, key_len = lengths[(turn + 5 * i) % len(lengths)]
        dtype, groups = (list(DTYPES.values())[(turn + i) // j % 3] for j in (1, 3))
        heads = (1, 2, 7)[(turn + i) % 3]
        key, value = (quantised(rng, 2, 1, key_len, max(64, group_size), dtype=groups, **how) for _ in range(2))
        query = normal(rng, 2, heads, length, max(64, group_size), dtype=dtype)
        mask = mask_kinds(rng, length, key_len)[(turn + 7 * i) % MASK_KINDS]()
        options = option_kinds(rng, heads)[(turn + 3 * i) % 8]
        schedule = SCHEDULES[(turn + i) % len(SCHEDULES)]
        assert_matches(query, key, value, kernel=kernel, schedule=schedule, **in_dtype(dtype, mask, options), **how)


HEAD_DIMS = [(32, 32, 32), (96, 160, 32), (128, 128, 64), (192, 64, 64), (256, 256, 128), (224, 256, 32)]
ABOVE_256 = [(512, 512, 128), (288, 352, 32)]


@pytest.mark.rotate(18)
@pytest.mark.parametrize(("kernel", "dims"), kernels_and_dims(QUANTISED, HEAD_DIMS, ABOVE_256), ids=str)
def test_head_dims(rng, kernel, dims):
    length, key_len = CASES[kernel][5]
    dim, value_dim, group_size = dims
    for bits, dtype in ((8, mx.float32), (4, mx.bfloat16), (3, mx.float16)):
        how = {"group_size": group_size, "bits": bits}
        key, value = (quantised(rng, 1, 2, key_len, columns, **how) for columns in (dim, value_dim))
        query = normal(rng, 1, 4, length, dim, dtype=dtype)
        assert_matches(query, key, value, mask="causal", kernel=kernel, **how)
