// The beginning of a kernel: macros for its arguments, and the position of its block. A kernel is a function of
// cuda::Arguments or of a struct derived from it. source_text() writes the kernel's constants before this text, and
// after it the entry point that calls the function.
#pragma once

#include "cuda/arguments.h"
#include "dialect.h"
#include "elements.h"

#define FLASHATTN_KERNEL FLASHATTN_FUNC void
#define FLASHATTN_WRITTEN(T, name) T* name = static_cast<T*>(arguments.arrays[FLASHATTN_BINDING_##name])
#define FLASHATTN_READ(T, name) FLASHATTN_WRITTEN(const T, name)
#define FLASHATTN_VALUE(T, name) const T& name = arguments.name

// The semicolon comes first, because lists of inputs.def expand to a series of such declarations.
#define FLASHATTN_OPTIONAL(name, called, dtype, axes) \
  ;                                                   \
  FLASHATTN_READ(FLASHATTN_ELEMENT_##dtype, name)

// K: the type of keys and values, or uint for quantised words.
#define FLASHATTN_INPUT_ARGUMENTS(T, K)     \
  FLASHATTN_VALUE(AttentionParams, params); \
  FLASHATTN_READ(T, query);                 \
  FLASHATTN_READ(K, key);                   \
  FLASHATTN_READ(K, value) FLASHATTN_MASKS(FLASHATTN_OPTIONAL) FLASHATTN_GROUPS(FLASHATTN_OPTIONAL)

// The outputs, and the sinks, which a kernel reads when it finishes a row.
#define FLASHATTN_OUTPUT_ARGUMENTS(T) \
  FLASHATTN_WRITTEN(T, out);          \
  FLASHATTN_WRITTEN(float, lse);      \
  FLASHATTN_WRITTEN(float, row_stats) FLASHATTN_SINKS(FLASHATTN_OPTIONAL)

namespace flashattn {

FLASHATTN_FUNC uint lane_index() {
  return threadIdx.x % FLASHATTN_LANES;
}
FLASHATTN_FUNC uint warp_index() {
  return threadIdx.x / FLASHATTN_LANES;
}

// What a block computes. A grid extends along x, the only axis with room for more than 65,535 blocks: part after part,
// and in each part the heads of all batch elements.
struct BlockPosition {
  int head;
  int batch;
  int part;   // which rows of the head, or which rows and keys
  int parts;  // valid only if no two blocks have the same rows
};
FLASHATTN_FUNC BlockPosition block_position(const AttentionParams& params, int heads, uint block = blockIdx.x) {
  uint heads_and_batches = uint(heads) * uint(params.batch_size);
  uint in_part = block % heads_and_batches;
  return BlockPosition{int(in_part % heads), int(in_part / heads), int(block / heads_and_batches),
                       int(gridDim.x / heads_and_batches)};
}

// The first of the up to `count` queries that a part has. Part 0 has the last queries: under a causal mask they see the
// most keys, and long blocks should start first.
FLASHATTN_FUNC int first_query(const AttentionParams& params, int part, int count) {
  return ((params.query_len - 1) / count - part) * count;
}

}  // namespace flashattn
