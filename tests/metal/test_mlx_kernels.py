"""Tests the emulator: MLX's own attention kernels are right on GPUs, so they must agree with float64 here, too."""

import pytest
from flashattn_core.reference import reference_attention

from tests.core.oracle import DTYPES, assert_within_rule, draw, to_numpy, unfused
from tests.metal.mlx_kernels import sdpa_vector, sdpa_vector_2pass, steel_attention

# heads, key/value heads, queries, keys, head_dim, mask
SHAPES = {
    sdpa_vector: [(4, 2, 1, 77, 64, None), (2, 1, 3, 100, 128, "causal"), (2, 2, 5, 5, 64, "causal")],
    sdpa_vector_2pass: [(4, 2, 2, 301, 64, "causal"), (4, 4, 1, 130, 128, None), (2, 1, 1, 9, 64, None)],
    steel_attention: [
        (2, 1, 64, 64, 64, None),
        (2, 1, 50, 77, 64, "causal"),
        (2, 2, 40, 45, 128, None),
        (1, 1, 64, 64, 128, "causal"),
        (1, 1, 33, 31, 64, None),
    ],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", SHAPES)
def test_shapes(rng, kernel, dtype):
    for heads, kv_heads, length, key_len, dim, mask in SHAPES[kernel]:
        arrays = draw(
            rng, batch=(2,), heads=heads, kv_heads=kv_heads, length=length, key_len=key_len, dim=dim, dtype=dtype
        )
        out, _ = kernel(*arrays, mask=mask)
        expected, _ = reference_attention(*map(to_numpy, arrays), None, mask)
        by_unfused = [lambda arrays=arrays, mask=mask: to_numpy(unfused(*arrays, mask=mask)[0])]
        assert_within_rule(to_numpy(out), expected, by_unfused, "out")
