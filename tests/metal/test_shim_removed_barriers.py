"""Without one of its barriers a kernel of MLX's is wrong, and the harness says so: for each barrier there is."""

import re

import numpy as np
import pytest
from attention64 import draw
from metal_on_cpu import RaceError, UninitialisedError
from mlx_kernels import (
    KERNELS,
    SOFTMAX_SOURCE,
    STEEL_SOURCE,
    VECTOR_SOURCE,
    compile_kernels,
    sdpa_vector,
    sdpa_vector_2pass,
    softmax,
    steel_attention,
    steel_program,
    vector_program,
)

FLOAT, HALF = np.dtype(np.float32), np.dtype(np.float16)
BARRIER = re.compile(r"\bthreadgroup_barrier\(mem_flags::mem_\w+\);")
HEADERS = {
    "sdpa_vector.h": VECTOR_SOURCE,
    "softmax.h": SOFTMAX_SOURCE,
    "steel/attn/kernels/steel_attention.h": STEEL_SOURCE,
}

REDUNDANT = {
    # Nothing has touched threadgroup memory yet.
    ("steel/attn/kernels/steel_attention.h", 0),
    # The last barrier comes after the last use of threadgroup memory, and names no memory to order (mem_none).
    ("steel/attn/kernels/steel_attention.h", 7),
}


def barriers():
    for header in HEADERS:
        for number in range(len(BARRIER.findall((KERNELS / header).read_text()))):
            yield pytest.param(header, number, id=f"{header.rpartition('/')[2]}-{number}")


def without_barrier(header, number):
    text = (KERNELS / header).read_text()
    barrier = list(BARRIER.finditer(text))[number]
    text = text[: barrier.start()] + " " * len(barrier[0]) + text[barrier.end() :]
    include = f'#include "mlx/backend/metal/kernels/{header}"'
    assert include in HEADERS[header]
    return HEADERS[header].replace(include, f'#line 1 "{header}"\n{text}\n')


def run_all(header, source, rng):
    """Everything that the header's kernels do with threadgroup memory."""
    if header == "sdpa_vector.h":
        program = vector_program(FLOAT, 64, source)
        operands = draw(rng, "float", heads=8, kv_heads=1, length=1, key_len=77, dim=64)
        sdpa_vector(*operands, 0.125, program=program)
        sdpa_vector_2pass(*operands, 0.125, program=program)
        sdpa_vector_2pass(*operands, 0.125, gqa=True, program=program)
    elif header == "softmax.h":
        program = compile_kernels(source, "RUN_TYPE=float")
        for looped in (False, True):
            softmax(rng.standard_normal((3, 1000)).astype(np.float32), looped=looped, program=program)
    else:
        operands = draw(rng, "float", heads=1, kv_heads=1, length=50, key_len=77, dim=64)
        steel_attention(*operands, 0.125, causal=True, program=steel_program(FLOAT, 64, source=source))
        operands = draw(rng, "half", heads=1, kv_heads=1, length=50, key_len=77, dim=128)
        two_groups = steel_program(HALF, 128, block_k=32, wn=2, source=source)
        steel_attention(*operands, 0.125, causal=True, block_k=32, wn=2, program=two_groups)


@pytest.mark.parametrize(("header", "number"), list(barriers()))
def test_each(rng, header, number):
    source = without_barrier(header, number)
    if (header, number) in REDUNDANT:
        run_all(header, source, rng)
    else:
        with pytest.raises((RaceError, UninitialisedError)):
            run_all(header, source, rng)


@pytest.mark.parametrize("header", HEADERS)
def test_with_all_barriers_there_is_no_race(rng, header):
    run_all(header, HEADERS[header], rng)
