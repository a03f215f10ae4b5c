// What a kernel begins with: its arguments by their names, and which of the launch's blocks it is. It is a function of
// cuda::Arguments or BoxArguments. source_text() writes the entry that calls it, and its constants in front of this.
#pragma once

#include "cuda/arguments.h"
#include "dialect.h"
#include "elements.h"

#define FLASHATTN_KERNEL FLASHATTN_FUNC void
#define FLASHATTN_WRITTEN(T, name) T* name = static_cast<T*>(arguments.arrays[FLASHATTN_BINDING_##name])
#define FLASHATTN_READ(T, name) FLASHATTN_WRITTEN(const T, name)
#define FLASHATTN_VALUE(T, name) const T& name = arguments.name

// With the semicolon before it: lists of inputs.def are made of these.
#define FLASHATTN_OPTIONAL(name, called, dtype, axes) \
  ;                                                   \
  FLASHATTN_READ(FLASHATTN_ELEMENT_##dtype, name)

// K: the type of keys and values, or uint for quantised words.
#define FLASHATTN_INPUT_ARGUMENTS(T, K)     \
  FLASHATTN_VALUE(AttentionParams, params); \
  FLASHATTN_READ(T, query);                 \
  FLASHATTN_READ(K, key);                   \
  FLASHATTN_READ(K, value) FLASHATTN_MASKS(FLASHATTN_OPTIONAL) FLASHATTN_GROUPS(FLASHATTN_OPTIONAL)

// And the sinks, which are read when a row is finished.
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

// Blocks are numbered in one dimension, which alone may have more than 65,535 of them: heads of all batch elements side
// by side, part after part.
struct BlockPosition {
  int head;
  int batch;
  int part;
  int parts;  // only where no two blocks have the same rows
};
FLASHATTN_FUNC BlockPosition block_position(const AttentionParams& params, int heads, uint block) {
  uint heads_and_batches = uint(heads) * uint(params.batch_size);
  uint in_part = block % heads_and_batches;
  return BlockPosition{int(in_part % heads), int(in_part / heads), int(block / heads_and_batches),
                       int(gridDim.x / heads_and_batches)};
}
FLASHATTN_FUNC BlockPosition block_position(const AttentionParams& params, int heads) {
  return block_position(params, heads, blockIdx.x);
}

// The first of up to `count` queries of one head, which a part has. The last ones come first: under a causal mask they
// see the most keys, and a long block should not start last.
FLASHATTN_FUNC int first_query(const AttentionParams& params, int part, int count) {
  return ((params.query_len - 1) / count - part) * count;
}

}  // namespace flashattn
