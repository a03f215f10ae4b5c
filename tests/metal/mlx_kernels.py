"""Runs MLX's own attention kernels in the emulator. Their source is in the headers of MLX's wheel.

Query, key and value are shaped as for flash_attention(). The mask is "causal" or None; the scale is head_dim**-0.5.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.emulators.metal_on_cpu import Counts, Program, Result, Undefined
from tests.emulators.metal_on_cpu.program import Buffer
from tests.metal.metal_attention import TYPES, as_numpy, to_mlx

INCLUDE = Path(mx.__file__).parent / "include"
INCLUDE_DIRS = (Path(__file__).parent / "mlx_headers", INCLUDE)  # the first folder replaces some of MLX's headers

VECTOR_SOURCE = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/sdpa_vector.h"
instantiate_kernel("one_pass", sdpa_vector, {type}, {dim}, {dim})
instantiate_kernel("first_pass", sdpa_vector_2pass_1, {type}, {dim}, {dim})
instantiate_kernel("second_pass", sdpa_vector_2pass_2, {type}, {dim})
"""

STEEL_SOURCE = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"
instantiate_kernel("attention", attention, {type}, 32, {block_k}, {dim}, {dim}, 4, 1, bool, float)
"""

Done = tuple[mx.array, Counts]


@cache
def program(source: str) -> Program:
    return Program(source, include_dirs=INCLUDE_DIRS)


def complete(done: Result, dtype: mx.Dtype) -> Done:
    """Returns the result (buffer 3 of every kernel here) and the counts. Every element must have been written."""
    assert not any(done.unwritten.values())
    return to_mlx(done.buffers[3], dtype), done.counts


def sdpa_vector(query: mx.array, key: mx.array, value: mx.array, mask: str | None = None) -> Done:
    """MLX's kernel for few queries. A threadgroup computes one row of the output."""
    batch, heads, length, dim = query.shape
    arrays = [as_numpy(array) for array in (query, key, value)]
    done = program(VECTOR_SOURCE.format(type=TYPES[query.dtype], dim=dim)).run(
        "one_pass",
        grid=(batch * heads, length, 1),
        threadgroup=(1024, 1, 1),
        buffers={
            **dict(enumerate([*arrays, Undefined(query.shape, arrays[0].dtype), np.int32(heads // key.shape[1])])),
            **_from(5, key),
        },
        outputs={3},
        constants=_vector_constants(mask),
    )
    return complete(done, query.dtype)


def _from(index: int, key: mx.array) -> dict[int, Buffer]:
    """The buffers from `index` on: the number of keys, the strides of keys and of values, the scale."""
    length, dim = key.shape[2:]
    strides = [np.uint64(length * dim), np.uint64(dim)] * 2
    return dict(enumerate([np.int32(length), *strides, np.float32(dim**-0.5)], start=index))


def _vector_constants(mask: str | None, blocks: int = 0) -> dict[int, int]:
    return {20: False, 21: False, 22: mask == "causal", 23: False, 24: False, 25: False, 26: blocks}  # 25: sinks


def sdpa_vector_2pass(query: mx.array, key: mx.array, value: mx.array, mask: str | None = None, blocks=32) -> Done:
    """MLX's kernels for few queries and many keys. `blocks` threadgroups share a row, and a second kernel merges."""
    batch, heads, length, dim = query.shape
    arrays = [as_numpy(array) for array in (query, key, value)]
    kernels = program(VECTOR_SOURCE.format(type=TYPES[query.dtype], dim=dim))
    partials = (batch, heads, length, blocks)
    first = kernels.run(
        "first_pass",
        grid=(key.shape[1], batch, blocks),
        threadgroup=(32, heads // key.shape[1], length),
        buffers={
            **dict(enumerate([*arrays, Undefined((*partials, dim), arrays[0].dtype)])),
            **{index: Undefined(partials, np.float32) for index in (4, 5)},
            **_from(7, key),
        },
        outputs={3, 4, 5},
        constants=_vector_constants(mask, blocks),
    )
    of_partials = [first.buffers[index] for index in (3, 4, 5)]
    second = kernels.run(
        "second_pass",
        grid=(batch * heads, length, 1),
        threadgroup=(1024, 1, 1),
        buffers=dict(enumerate([*of_partials, Undefined(query.shape, arrays[0].dtype), np.int32(blocks)])),
        outputs={3},
        constants=_vector_constants(mask, blocks),
    )
    out, counts = complete(second, query.dtype)
    return out, first.counts + counts


def steel_attention(query: mx.array, key: mx.array, value: mx.array, mask: str | None = None) -> Done:
    """MLX's kernel for many queries. A threadgroup has 4 SIMD groups and computes 32 queries."""
    batch, heads, length, dim = query.shape
    kv_heads, key_len = key.shape[1:3]
    arrays = [as_numpy(array) for array in (query, key, value)]
    block_q, block_k = 32, 32 if dim < 128 else 16  # MLX's choice
    query_blocks, key_blocks = -(-length // block_q), -(-key_len // block_k)
    parameters = struct.pack(
        "<6if7i12q",
        *(batch, heads, dim, length, key_len, heads // kv_heads, dim**-0.5, query_blocks, key_blocks),
        *(length // block_q, key_len // block_k, length % block_q, key_len % block_k, key_len - length),
        *(heads * length * dim, length * dim, dim),
        *(kv_heads * key_len * dim, key_len * dim, dim) * 2,
        *(heads * length * dim, length * dim, dim),
    )
    done = program(STEEL_SOURCE.format(type=TYPES[query.dtype], block_k=block_k, dim=dim)).run(
        "attention",
        grid=(query_blocks, heads, batch),
        threadgroup=(32, 4, 1),
        buffers=dict(enumerate([*arrays, Undefined(query.shape, arrays[0].dtype), parameters])),
        outputs={3},
        constants={
            200: length % block_q == 0,
            201: key_len % block_k == 0,
            300: False,  # no array mask
            301: mask == "causal",
            302: False,  # no sinks
            303: False,  # no lse
        },
    )
    return complete(done, query.dtype)
