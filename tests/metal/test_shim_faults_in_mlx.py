"""Mistakes planted in MLX's attention kernel, each noticed by what is there to notice it."""

import numpy as np
import pytest
from attention64 import attention64, draw, relative_error
from metal_on_cpu import DivergenceError, LimitError, OutOfBoundsError, RaceError
from mlx_kernels import KERNELS, STEEL_SOURCE, steel_attention, steel_program

HEADER = "steel/attn/kernels/steel_attention.h"
CLEAR = "    Stile.clear();\n\n    threadgroup_barrier(mem_flags::mem_threadgroup);"
FAULTS = {
    "keys beyond the last": (
        "loader_k.load_safe(short2(BD, params->kL_rem));",
        "loader_k.load_unsafe();",
        OutOfBoundsError,
    ),
    "a barrier for some lanes": (
        CLEAR,
        CLEAR.replace("threadgroup_barrier", "if (simd_lane_id < 16) threadgroup_barrier"),
        DivergenceError,
    ),
    "an early return": ("  Otile.clear();\n", "  Otile.clear(); if (simd_group_id == 3) return;\n", DivergenceError),
    "an array a row too short": (
        "threadgroup T KV_smem[tgp_mem_s];",
        "threadgroup T KV_smem[tgp_mem_s - 64];",
        OutOfBoundsError,
    ),
    "too much threadgroup memory": (
        "threadgroup T KV_smem[tgp_mem_s];",
        "threadgroup T KV_smem[tgp_mem_s + 8000];",
        LimitError,
    ),
    "all SIMD groups store the same rows": (
        "const short tm = kFragSize * TQ * row_group;",
        "const short tm = 0;",
        RaceError,
    ),
}


def run(rng, source=STEEL_SOURCE, defines=()):
    operands = draw(rng, "float", heads=1, kv_heads=1, length=50, key_len=77, dim=64)
    program = steel_program(operands[0].dtype, 64, source=source, defines=defines)
    out, _ = steel_attention(*operands, 0.125, program=program)
    return relative_error(out, attention64(*operands, 0.125)[0])


@pytest.mark.parametrize("name", FAULTS)
def test_fault(rng, name):
    right, wrong, error = FAULTS[name]
    text = (KERNELS / HEADER).read_text()
    assert right in text
    include = f'#include "mlx/backend/metal/kernels/{HEADER}"'
    source = STEEL_SOURCE.replace(include, f'#line 1 "{HEADER}"\n{text.replace(right, wrong, 1)}\n')
    with pytest.raises(error):
        run(rng, source)


def test_wrong_lane_layout_gives_wrong_results(rng):
    assert run(rng) < 1e-6
    assert not run(rng, defines=("MSL_WRONG_LANE_LAYOUT",)) < 0.1


def test_wrong_scale_gives_wrong_results(rng):
    """The tolerance is no formality."""
    operands = draw(rng, "float", heads=1, kv_heads=1, length=50, key_len=77, dim=64)
    out, _ = steel_attention(*operands, np.float32(0.125).item() * 1.0001)
    assert relative_error(out, attention64(*operands, 0.125)[0]) > 1e-5
