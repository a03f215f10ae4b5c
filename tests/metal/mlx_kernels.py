"""MLX's own kernels on the CPU, from the headers in its wheel: a yardstick for results, and for what a launch costs.

Arrays are (batch, heads, length, head_dim), float32 or float16, or bfloat16 as uint16 (see to_bfloat16).
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core
import numpy as np
from metal_on_cpu import Counts, Program, Undefined
from metal_on_cpu.program import Buffer

INCLUDE = Path(mlx.core.__file__).parent / "include"
KERNELS = INCLUDE / "mlx/backend/metal/kernels"
INCLUDE_DIRS = (Path(__file__).parent / "mlx_headers", INCLUDE)  # first those in place of MLX's

TYPES = {np.dtype(np.float32): "float", np.dtype(np.float16): "half", np.dtype(np.uint16): "bfloat"}

VECTOR_SOURCE = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/sdpa_vector.h"
instantiate_kernel("one_pass", sdpa_vector, RUN_TYPE, RUN_DIM, RUN_DIM)
instantiate_kernel("first_pass", sdpa_vector_2pass_1, RUN_TYPE, RUN_DIM, RUN_DIM)
instantiate_kernel("second_pass", sdpa_vector_2pass_2, RUN_TYPE, RUN_DIM)
instantiate_kernel("first_pass_gqa", sdpa_vector_2pass_1_gqa, RUN_TYPE, RUN_DIM, RUN_DIM, 8, 2)
"""

STEEL_SOURCE = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"
instantiate_kernel("attention", attention, RUN_TYPE, 32, RUN_BLOCK_K, RUN_DIM, RUN_DIM, 4, RUN_WN, bool, float)
"""


class Done(NamedTuple):
    out: np.ndarray
    counts: Counts
    lse: np.ndarray | None = None


@cache
def compile_kernels(source: str, *definitions: str) -> Program:
    return Program(source, name="mlx", include_dirs=INCLUDE_DIRS, defines=definitions)


def sdpa_vector(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    *,
    causal: bool = False,
    schedule: str = "forward",
    source: str = VECTOR_SOURCE,
) -> Done:
    """The kernel of short queries: a threadgroup for each row."""
    batch, heads, length, dim = query.shape
    done = compile_kernels(source, f"RUN_TYPE={TYPES[query.dtype]}", f"RUN_DIM={dim}").run(
        "one_pass",
        grid=(batch * heads, length, 1),
        threadgroup=(1024, 1, 1),
        buffers={
            **dict(enumerate((query, key, value, Undefined(query.shape, query.dtype)))),
            4: np.int32(heads // key.shape[1]),
            **_from(5, key, scale),
        },
        outputs={3},
        constants=_vector_constants(causal),
        schedule=schedule,
    )
    assert done.unwritten == {3: 0}
    return Done(done.buffers[3], done.counts)


def _from(index: int, key: np.ndarray, scale: float) -> dict[int, Buffer]:
    """How many keys, the strides of keys and of values, the scale."""
    length, dim = key.shape[2:]
    strides = [np.uint64(length * dim), np.uint64(dim)] * 2
    return dict(enumerate([np.int32(length), *strides, np.float32(scale)], start=index))


def _vector_constants(causal: bool, blocks: int = 0) -> dict[int, bool | int | float]:
    return {20: False, 21: False, 22: causal, 23: False, 24: False, 25: False, 26: blocks}  # no mask, no sinks


def sdpa_vector_2pass(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    *,
    blocks: int = 32,
    causal: bool = False,
    gqa: bool = False,
    schedule: str = "forward",
    source: str = VECTOR_SOURCE,
) -> Done:
    """The kernels of short queries and many keys: `blocks` threadgroups share a row, a second kernel combines.

    `gqa`: the first kernel's variant for eight query heads of each key head, and one query.
    """
    batch, heads, length, dim = query.shape
    program = compile_kernels(source, f"RUN_TYPE={TYPES[query.dtype]}", f"RUN_DIM={dim}")
    partials = (batch, heads, length, blocks)
    first = program.run(
        "first_pass_gqa" if gqa else "first_pass",
        grid=(key.shape[1], batch, blocks),
        threadgroup=(32, heads // key.shape[1], length),
        buffers={
            **dict(enumerate((query, key, value, Undefined((*partials, dim), query.dtype)))),
            **{index: Undefined(partials, np.float32) for index in (4, 5)},
            **_from(7, key, scale),
        },
        outputs={3, 4, 5},
        constants=_vector_constants(causal, blocks),
        schedule=schedule,
    )
    assert first.unwritten == {3: 0, 4: 0, 5: 0}
    second = program.run(
        "second_pass",
        grid=(batch * heads, length, 1),
        threadgroup=(1024, 1, 1),
        buffers={
            **dict(enumerate(first.buffers[index] for index in (3, 4, 5))),
            3: Undefined(query.shape, query.dtype),
            4: np.int32(blocks),
        },
        outputs={3},
        constants=_vector_constants(causal, blocks),
        schedule=schedule,
    )
    assert second.unwritten == {3: 0}
    return Done(second.buffers[3], first.counts + second.counts)


def steel_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    *,
    causal: bool = False,
    block_k: int | None = None,
    wn: int = 1,
    lse: bool = False,
    schedule: str = "forward",
    source: str = STEEL_SOURCE,
    defines: tuple[str, ...] = (),
) -> Done:
    """The kernel of long queries: 32 of them in 4 times `wn` SIMD groups."""
    batch, heads, length, dim = query.shape
    kv_heads, key_len = key.shape[1:3]
    block_q, block_k = 32, block_k or (32 if dim < 128 else 16)  # MLX's choice
    sizes = (f"RUN_TYPE={TYPES[query.dtype]}", f"RUN_BLOCK_K={block_k}", f"RUN_DIM={dim}", f"RUN_WN={wn}")
    query_blocks, key_blocks = -(-length // block_q), -(-key_len // block_k)
    parameters = struct.pack(
        "<6if7i12q",
        *(batch, heads, dim, length, key_len, heads // kv_heads, scale, query_blocks, key_blocks),
        *(length // block_q, key_len // block_k, length % block_q, key_len % block_k, key_len - length),
        *(heads * length * dim, length * dim, dim),
        *(kv_heads * key_len * dim, key_len * dim, dim) * 2,
        *(heads * length * dim, length * dim, dim),
    )
    buffers = dict(enumerate((query, key, value, Undefined(query.shape, query.dtype), parameters)))
    if lse:
        buffers[8] = Undefined((batch, heads, length), np.float32)
    done = compile_kernels(source, *sizes, *defines).run(
        "attention",
        grid=(query_blocks, heads, batch),
        threadgroup=(32, 4, wn),
        buffers=buffers,
        outputs=buffers.keys() & {3, 8},
        constants={
            200: length % block_q == 0,
            201: key_len % block_k == 0,
            300: False,  # a mask
            301: causal,
            302: False,  # sinks
            303: lse,
        },
        schedule=schedule,
    )
    assert not any(done.unwritten.values())
    return Done(done.buffers[3], done.counts, done.buffers.get(8))
