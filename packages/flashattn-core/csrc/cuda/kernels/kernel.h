// Every CUDA kernel includes this header. It has macros for a kernel's arguments, and finds the position of a block. A
// kernel is a function that takes cuda::Arguments or a struct derived from it. source_text() writes the kernel's
// constants before this text, and the entry point that calls the function after it.
#pragma once

#include "cuda/arguments.h"
#include "dialect.h"
#include "elements.h"

#define FLASHATTN_KERNEL FLASHATTN_FUNC void
#define FLASHATTN_WRITTEN(T, name) T* name = static_cast<T*>(arguments.arrays[FLASHATTN_BINDING_##name])
#define FLASHATTN_READ(T, name) FLASHATTN_WRITTEN(const T, name)
#define FLASHATTN_VALUE(T, name) const T& name = arguments.name

// Declares an optional input. The semicolon comes first, because the lists in inputs.def have no separators.
#define FLASHATTN_OPTIONAL(name, called, dtype, axes) \
  ;                                                   \
  FLASHATTN_READ(FLASHATTN_ELEMENT_##dtype, name)

// K: the type of keys and values. For quantised keys and values it is uint, the type of the packed words.
#define FLASHATTN_INPUT_ARGUMENTS(T, K)     \
  FLASHATTN_VALUE(AttentionParams, params); \
  FLASHATTN_READ(T, query);                 \
  FLASHATTN_READ(K, key);                   \
  FLASHATTN_READ(K, value) FLASHATTN_MASKS(FLASHATTN_OPTIONAL) FLASHATTN_GROUPS(FLASHATTN_OPTIONAL)

// Declares the outputs and the input `sinks`. A kernel reads `sinks` when it writes a row of the output.
#define FLASHATTN_OUTPUT_ARGUMENTS(T)  \
  FLASHATTN_WRITTEN(T, out);           \
  FLASHATTN_WRITTEN(float, lse);       \
  FLASHATTN_WRITTEN(float, exact_out); \
  FLASHATTN_WRITTEN(float, row_stats) FLASHATTN_SINKS(FLASHATTN_OPTIONAL)

namespace flashattn {

FLASHATTN_FUNC uint lane_index() {
  return threadIdx.x % FLASHATTN_LANES;
}
FLASHATTN_FUNC uint warp_index() {
  return threadIdx.x / FLASHATTN_LANES;
}

// The part of the work that a block does. Blocks are ordered by part, then by batch element, then by head. All blocks
// are numbered along x, because the grid's other axes allow only 65,535 blocks.
struct BlockPosition {
  int head;
  int batch;
  int part;   // which rows of the head, and in some kernels also which chunk of the keys
  int parts;  // how many parts there are; not valid if blocks of prefill_hopper.cu share keys
};
FLASHATTN_FUNC BlockPosition block_position(const AttentionParams& params, int heads, uint block = blockIdx.x) {
  uint heads_and_batches = uint(heads) * uint(params.batch_size);
  uint in_part = block % heads_and_batches;
  return BlockPosition{int(in_part % heads), int(in_part / heads), int(block / heads_and_batches),
                       int(gridDim.x / heads_and_batches)};
}

// The first query of a part, which has up to `count` queries. Part 0 has the last queries, because these see the most
// keys under a causal mask. The longest blocks should start first.
FLASHATTN_FUNC int first_query(const AttentionParams& params, int part, int count) {
  return ((params.query_len - 1) / count - part) * count;
}

}  // namespace flashattn
