"""MLX's own attention kernels, which GPUs run: they agree with float64 here, and what is broken in them is noticed.

A harness that runs these, and sees each of their barriers that is gone, can be trusted with ours.
"""

import re

import numpy as np
import pytest
from attention64 import DTYPES, TOLERANCE, attention64, draw, relative_error
from metal_on_cpu import DivergenceError, LimitError, OutOfBoundsError, RaceError, UninitialisedError
from mlx_kernels import KERNELS, STEEL_SOURCE, VECTOR_SOURCE, sdpa_vector, sdpa_vector_2pass, steel_attention

# heads, key/value heads, queries, keys, head_dim, causal
SHAPES = {
    sdpa_vector: [
        (4, 2, 1, 77, 64, False),
        (2, 1, 3, 100, 128, True),
        (1, 1, 1, 32, 64, False),
        (2, 2, 5, 5, 64, True),
    ],
    sdpa_vector_2pass: [(4, 2, 2, 301, 64, True), (4, 4, 1, 130, 128, False), (2, 1, 1, 9, 64, False)],
    steel_attention: [
        (2, 1, 64, 64, 64, False),
        (2, 1, 50, 77, 64, True),
        (2, 2, 40, 45, 128, False),
        (1, 1, 64, 64, 128, True),
        (1, 1, 33, 31, 64, False),
    ],
}
CASES = [pytest.param(kernel, *shape, id=f"{kernel.__name__}-{shape}") for kernel in SHAPES for shape in SHAPES[kernel]]


def operands(rng, dtype, heads, kv_heads, length, key_len, dim, batch=1):
    sizes = {"heads": heads, "kv_heads": kv_heads, "length": length, "key_len": key_len, "dim": dim}
    return *draw(rng, dtype, batch=batch, **sizes), dim**-0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "heads", "kv_heads", "length", "key_len", "dim", "causal"), CASES)
def test_shapes(rng, kernel, dtype, heads, kv_heads, length, key_len, dim, causal):
    arrays = operands(rng, dtype, heads, kv_heads, length, key_len, dim, batch=2)
    out, lse = attention64(*arrays, causal=causal)
    with_lse = {"lse": True} if kernel is steel_attention else {}
    done = kernel(*arrays, causal=causal, **with_lse)
    assert relative_error(done.out, out) < TOLERANCE[dtype]
    if with_lse:
        assert relative_error(done.lse, lse) < TOLERANCE["float"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_heads_of_a_key_head(rng, dtype):
    arrays = operands(rng, dtype, 16, 2, 1, 301, 64)
    assert relative_error(sdpa_vector_2pass(*arrays, gqa=True).out, attention64(*arrays)[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["half", "bfloat"])
def test_two_simd_groups_share_rows(rng, dtype):
    """They exchange halves of the scores, and multiply in the inputs' type."""
    arrays = operands(rng, dtype, 2, 1, 50, 77, 128)
    done = steel_attention(*arrays, causal=True, block_k=32, wn=2)
    assert relative_error(done.out, attention64(*arrays, causal=True)[0]) < TOLERANCE[dtype]
    assert set(done.counts.mma) == {dtype, f"float*{dtype}"}


@pytest.mark.parametrize("schedule", ["reverse", "greedy", "random:1"])
@pytest.mark.parametrize("kernel", SHAPES)
def test_schedules_change_nothing(kernel, schedule):
    arrays = operands(np.random.default_rng(0), "float", 2, 1, 5, 77, 64)
    first, other = kernel(*arrays), kernel(*arrays, schedule=schedule)
    np.testing.assert_array_equal(other.out, first.out)
    assert other.counts == first.counts


# --- What is broken is noticed -----------------------------------------------------------------------------

SOURCES = {"sdpa_vector.h": VECTOR_SOURCE, "steel/attn/kernels/steel_attention.h": STEEL_SOURCE}
BARRIER = re.compile(r"\bthreadgroup_barrier\(mem_flags::mem_\w+\);")
BARRIERS = [
    (header, number) for header in SOURCES for number in range(len(BARRIER.findall((KERNELS / header).read_text())))
]
REDUNDANT = {
    # Nothing has touched threadgroup memory yet.
    ("steel/attn/kernels/steel_attention.h", 0),
    # The last barrier comes after the last use of threadgroup memory, and names no memory to order (mem_none).
    ("steel/attn/kernels/steel_attention.h", 7),
}


def with_header(header, text):
    """The source with this text for its header."""
    include = f'#include "mlx/backend/metal/kernels/{header}"'
    assert include in SOURCES[header]
    return SOURCES[header].replace(include, f'#line 1 "{header}"\n{text}\n')


def run_all(header, source, rng):
    """Everything that the header's kernels do with threadgroup memory."""
    if header == "sdpa_vector.h":
        arrays = operands(rng, "float", 8, 1, 1, 77, 64)
        sdpa_vector(*arrays, source=source)
        sdpa_vector_2pass(*arrays, source=source)
        sdpa_vector_2pass(*arrays, gqa=True, source=source)
    else:
        steel_attention(*operands(rng, "float", 1, 1, 50, 77, 64), causal=True, source=source)
        two_groups = {"block_k": 32, "wn": 2}
        steel_attention(*operands(rng, "half", 1, 1, 50, 77, 128), causal=True, **two_groups, source=source)


@pytest.mark.parametrize(("header", "number"), BARRIERS)
def test_without_a_barrier_there_is_a_race(rng, header, number):
    text = (KERNELS / header).read_text()
    barrier = list(BARRIER.finditer(text))[number]
    source = with_header(header, text[: barrier.start()] + " " * len(barrier[0]) + text[barrier.end() :])
    if (header, number) in REDUNDANT:
        run_all(header, source, rng)
    else:
        with pytest.raises((RaceError, UninitialisedError)):
            run_all(header, source, rng)


CLEAR = "    Stile.clear();\n\n    threadgroup_barrier(mem_flags::mem_threadgroup);"
MEMORY = "threadgroup T KV_smem[tgp_mem_s];"
FAULTS = {
    "keys beyond the last": (
        "loader_k.load_safe(short2(BD, params->kL_rem));", "loader_k.load_unsafe();", OutOfBoundsError
    ),
    "a barrier for some lanes": (
        CLEAR, CLEAR.replace("threadgroup_barrier", "if (simd_lane_id < 16) threadgroup_barrier"), DivergenceError
    ),
    "an early return": ("  Otile.clear();\n", "  Otile.clear(); if (simd_group_id == 3) return;\n", DivergenceError),
    "an array a row too short": (MEMORY, MEMORY.replace("_s]", "_s - 64]"), OutOfBoundsError),
    "too much threadgroup memory": (MEMORY, MEMORY.replace("_s]", "_s + 8000]"), LimitError),
    "all SIMD groups store the same rows": (
        "const short tm = kFragSize * TQ * row_group;", "const short tm = 0;", RaceError
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault(rng, name):
    right, wrong, error = FAULTS[name]
    header = "steel/attn/kernels/steel_attention.h"
    text = (KERNELS / header).read_text()
    assert right in text
    with pytest.raises(error):
        run_all(header, with_header(header, text.replace(right, wrong, 1)), rng)


def test_wrong_results(rng):
    """Of another layout of the lanes; of a scale that is off by a ten-thousandth: the tolerance is no formality."""
    *arrays, scale = operands(rng, "float", 1, 1, 50, 77, 64)
    expected, _ = attention64(*arrays, scale)
    assert relative_error(steel_attention(*arrays, scale).out, expected) < 1e-6
    assert relative_error(steel_attention(*arrays, scale * 1.0001).out, expected) > 1e-5
    other_layout = steel_attention(*arrays, scale, defines=("MSL_WRONG_LANE_LAYOUT",))
    assert not relative_error(other_layout.out, expected) < 0.1
