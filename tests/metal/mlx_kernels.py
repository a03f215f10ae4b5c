"""MLX's own kernels on the CPU, from the headers in its wheel: a yardstick for results, and for what a launch costs.

Arrays are (batch, heads, length, head_dim), float32 or float16, or bfloat16 as uint16 (see to_bfloat16).
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import mlx.core
import numpy as np
from metal_on_cpu import Counts, Program, Undefined

INCLUDE = Path(mlx.core.__file__).parent / "include"
KERNELS = INCLUDE / "mlx/backend/metal/kernels"
HEADERS = Path(__file__).parent / "mlx_headers"  # in place of those that overload on address spaces
INCLUDE_DIRS = (HEADERS, INCLUDE)

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
#define RUN_TILES RUN_BLOCK_Q, RUN_BLOCK_K, RUN_DIM, RUN_DIM, RUN_WM, RUN_WN
instantiate_kernel("attention", attention, RUN_TYPE, RUN_TILES, RUN_MASK, float)
"""

SOFTMAX_SOURCE = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/softmax.h"
instantiate_kernel("block", softmax_single_row, RUN_TYPE, float)
instantiate_kernel("looped", softmax_looped, RUN_TYPE, float)
"""

GATED_DELTA_SOURCE = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/gated_delta_update.h"
instantiate_kernel("chunk", gated_delta_fused_chunk, float, RUN_DIM, RUN_DIM, RUN_KEY_HEADS, RUN_VALUE_HEADS, 8)
instantiate_kernel("sequential", gated_delta_seq, float, RUN_DIM, RUN_DIM, RUN_KEY_HEADS, RUN_VALUE_HEADS, 8)
"""


@cache
def compile_kernels(source: str, *definitions: str) -> Program:
    return Program(source, name="mlx", include_dirs=INCLUDE_DIRS, defines=definitions)


def vector_program(dtype: np.dtype, head_dim: int, source: str = VECTOR_SOURCE) -> Program:
    return compile_kernels(source, f"RUN_TYPE={TYPES[dtype]}", f"RUN_DIM={head_dim}")


def _int(value: int) -> bytes:
    return struct.pack("<i", value)


def _size(value: int) -> bytes:
    return struct.pack("<Q", value)


def _float(value: float) -> bytes:
    return struct.pack("<f", value)


def _mask_values(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.ascontiguousarray(np.broadcast_to(mask, shape))
    return mask.astype(np.uint8) if mask.dtype == bool else mask


def sdpa_vector(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    *,
    causal: bool = False,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    schedule: str = "forward",
    program: Program | None = None,
) -> tuple[np.ndarray, Counts]:
    """The kernel of short queries: a threadgroup for each row. A mask is bool, or of the query's type."""
    batch, heads, length, dim = query.shape
    kv_heads, kv_length = key.shape[1:3]
    program = program or vector_program(query.dtype, dim)
    buffers = {0: query, 1: key, 2: value, 3: Undefined(query.shape, query.dtype)}
    buffers |= {4: _int(heads // kv_heads), 5: _int(kv_length)}
    buffers |= {6: _size(kv_length * dim), 7: _size(dim), 8: _size(kv_length * dim), 9: _size(dim), 10: _float(scale)}
    is_bool = mask is not None and mask.dtype == bool
    if mask is not None:
        buffers[11 if is_bool else 12] = _mask_values(mask, (batch, heads, length, kv_length))
        buffers |= {13: _int(1), 14: _int(kv_length), 15: _int(length * kv_length)}
    if sinks is not None:
        buffers |= {16: sinks, 17: _int(heads)}
    constants = _vector_constants(causal, mask, sinks)
    done = program.run(
        "one_pass",
        grid=(batch * heads, length, 1),
        threadgroup=(1024, 1, 1),
        buffers=buffers,
        outputs={3},
        constants=constants,
        schedule=schedule,
    )
    assert done.unwritten == {3: 0}
    return done.buffers[3], done.counts


def _vector_constants(causal: bool, mask: np.ndarray | None, sinks: np.ndarray | None, blocks: int = 0) -> dict:
    is_bool = mask is not None and mask.dtype == bool
    has_mask = mask is not None
    is_float = has_mask and not is_bool
    return {20: has_mask, 21: False, 22: causal, 23: is_bool, 24: is_float, 25: sinks is not None, 26: blocks}


def sdpa_vector_2pass(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    *,
    blocks: int = 32,
    causal: bool = False,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    gqa: bool = False,
    schedule: str = "forward",
    program: Program | None = None,
) -> tuple[np.ndarray, Counts]:
    """The kernels of short queries and many keys: `blocks` threadgroups share a row, a second kernel combines.

    `gqa`: the first kernel's variant for eight query heads of each key head, one query, and no mask.
    """
    batch, heads, length, dim = query.shape
    kv_heads, kv_length = key.shape[1:3]
    program = program or vector_program(query.dtype, dim)
    partials = (batch, heads, length, blocks)
    buffers = {0: query, 1: key, 2: value, 3: Undefined((*partials, dim), query.dtype)}
    buffers |= {4: Undefined(partials, np.float32), 5: Undefined(partials, np.float32), 7: _int(kv_length)}
    buffers |= {8: _size(kv_length * dim), 9: _size(dim), 10: _size(kv_length * dim), 11: _size(dim), 12: _float(scale)}
    is_bool = mask is not None and mask.dtype == bool
    if mask is not None:
        buffers[13 if is_bool else 14] = _mask_values(mask, (batch, heads, length, kv_length))
        buffers |= {15: _int(1), 16: _int(kv_length), 17: _int(length * kv_length)}
    if sinks is not None:
        buffers[18] = sinks
    constants = _vector_constants(causal, mask, sinks, blocks)
    first = program.run(
        "first_pass_gqa" if gqa else "first_pass",
        grid=(kv_heads, batch, blocks),
        threadgroup=(32, heads // kv_heads, length),
        buffers=buffers,
        outputs={3, 4, 5},
        constants=constants,
        schedule=schedule,
    )
    assert first.unwritten == {3: 0, 4: 0, 5: 0}
    second = program.run(
        "second_pass",
        grid=(batch * heads, length, 1),
        threadgroup=(1024, 1, 1),
        buffers={
            0: first.buffers[3],
            1: first.buffers[4],
            2: first.buffers[5],
            3: Undefined(query.shape, query.dtype),
            4: _int(blocks),
        },
        outputs={3},
        constants=constants,
        schedule=schedule,
    )
    assert second.unwritten == {3: 0}
    return second.buffers[3], first.counts + second.counts


def steel_program(
    dtype: np.dtype,
    head_dim: int,
    block_q: int = 32,
    block_k: int | None = None,
    wm: int = 4,
    wn: int = 1,
    mask: str = "bool",
    source: str = STEEL_SOURCE,
    defines: tuple[str, ...] = (),
) -> Program:
    block_k = block_k or (32 if head_dim < 128 else 16)
    sizes = {"BLOCK_Q": block_q, "BLOCK_K": block_k, "DIM": head_dim, "WM": wm, "WN": wn, "MASK": mask}
    settings = [f"RUN_{name}={value}" for name, value in sizes.items()]
    return compile_kernels(source, f"RUN_TYPE={TYPES[dtype]}", *settings, *defines)


def steel_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    scale: float,
    *,
    causal: bool = False,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    block_q: int = 32,
    block_k: int | None = None,
    wm: int = 4,
    wn: int = 1,
    lse: bool = False,
    schedule: str = "forward",
    program: Program | None = None,
) -> tuple[np.ndarray, Counts] | tuple[np.ndarray, Counts, np.ndarray]:
    """The kernel of long queries. A mask is bool, or of the query's type; `lse`: returns the log-sum-exp, too."""
    batch, heads, length, dim = query.shape
    kv_heads, kv_length = key.shape[1:3]
    block_k = block_k or (32 if dim < 128 else 16)  # MLX's choice
    is_bool = mask is None or mask.dtype == bool
    mask_type = "bool" if is_bool else TYPES[query.dtype]
    program = program or steel_program(query.dtype, dim, block_q, block_k, wm, wn, mask_type)
    query_blocks, key_blocks = -(-length // block_q), -(-kv_length // block_k)
    parameters = struct.pack(
        "<6if7i12q",
        *(batch, heads, dim, length, kv_length, heads // kv_heads, scale, query_blocks, key_blocks),
        *(length // block_q, kv_length // block_k, length % block_q, kv_length % block_k, kv_length - length),
        *(heads * length * dim, length * dim, dim),
        *(kv_heads * kv_length * dim, kv_length * dim, dim) * 2,
        *(heads * length * dim, length * dim, dim),
    )
    buffers = {0: query, 1: key, 2: value, 3: Undefined(query.shape, query.dtype), 4: parameters}
    if mask is not None:
        buffers[5] = struct.pack("<3q", heads * length * kv_length, length * kv_length, kv_length)
        buffers[6] = _mask_values(mask, (batch, heads, length, kv_length))
    if sinks is not None:
        buffers[7] = sinks
    if lse:
        buffers[8] = Undefined((batch, heads, length), np.float32)
    done = program.run(
        "attention",
        grid=(query_blocks, heads, batch),
        threadgroup=(32, wm, wn),
        buffers=buffers,
        outputs={3, 8} if lse else {3},
        constants={
            200: length % block_q == 0,
            201: kv_length % block_k == 0,
            300: mask is not None,
            301: causal,
            302: sinks is not None,
            303: lse,
        },
        schedule=schedule,
    )
    assert not any(done.unwritten.values())
    return (done.buffers[3], done.counts, done.buffers[8]) if lse else (done.buffers[3], done.counts)


def softmax(
    values: np.ndarray, *, looped: bool = False, schedule: str = "forward", program: Program | None = None
) -> tuple[np.ndarray, Counts]:
    """Over the last axis of a matrix."""
    rows, length = values.shape
    program = program or compile_kernels(SOFTMAX_SOURCE, f"RUN_TYPE={TYPES[values.dtype]}")
    threads = 1024 if looped else -(-length // (4 * 32)) * 32
    done = program.run(
        "looped" if looped else "block",
        grid=(rows, 1, 1),
        threadgroup=(threads, 1, 1),
        buffers={0: values, 1: Undefined(values.shape, values.dtype), 2: _int(length)},
        outputs={1},
        schedule=schedule,
    )
    assert done.unwritten == {1: 0}
    return done.buffers[1], done.counts


def gated_delta(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    state: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    *,
    chunked: bool,
    schedule: str = "forward",
    defines: tuple[str, ...] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of linear attention; the chunked kernel addresses matrix elements by their lanes itself.

    Shapes: query and key (batch, length, key heads, dim), value (batch, length, value heads, dim),
    state (batch, value heads, dim, dim), decay and beta (batch, length, value heads).
    """
    batch, length, key_heads, dim = query.shape
    value_heads = value.shape[2]
    sizes = (f"RUN_DIM={dim}", f"RUN_KEY_HEADS={key_heads}", f"RUN_VALUE_HEADS={value_heads}")
    program = compile_kernels(GATED_DELTA_SOURCE, *sizes, *defines)
    done = program.run(
        "chunk" if chunked else "sequential",
        grid=(1, dim // (32 if chunked else 4), batch * value_heads),
        threadgroup=(32, 4, 1),
        buffers={
            **dict(enumerate((query, key, value, state, decay, beta))),
            6: Undefined(value.shape, value.dtype),
            7: Undefined(state.shape, state.dtype),
            8: _int(length),
        },
        outputs={6, 7},
        constants={200: False},
        schedule=schedule,
    )
    return done.buffers[6], done.buffers[7]
