// Functions for one batch element: its offset in an array, its key range, and the flags of its block map.
#pragma once

#include "../call/block_map.h"
#include "../call/spans.h"
#include "forward.h"

namespace flashattn::cpu {

// Returns the offset of a batch element, in elements of the array. batch: its number in row-major order.
static inline __attribute__((always_inline)) int64_t batch_offset(const AttentionParams& params, const Strides& strides,
                                                                  int64_t batch) {
  int64_t offset = 0;
  for (int d = params.batch_dims - 1; d >= 0; --d) {
    offset += batch % params.batch_shape[d] * strides.batch[d];
    batch /= params.batch_shape[d];
  }
  return offset;
}

static inline __attribute__((always_inline)) KeyRange key_range(const AttentionArgs& args, int64_t batch) {
  const AttentionParams& p = args.params;
  return {args.key_start ? args.key_start[batch_offset(p, p.key_start, batch)] : 0,
          args.key_stop ? args.key_stop[batch_offset(p, p.key_stop, batch)] : p.key_len};
}

// Rows of one batch element: all queries in the span `queries`, for all heads in the span `heads`.
struct QueryRows {
  int64_t batch;
  Span heads, queries;
};

// Returns the block map's flags for these rows and for the block of keys with index `block`. Without a map, both flags
// are set.
static inline __attribute__((always_inline)) int mapped_block(const AttentionArgs& args, const QueryRows& rows,
                                                              int block) {
  if (!args.block_map) return kBlockShows | kBlockChanges;
  const Strides& strides = args.params.block_map;
  const uint8_t* map = args.block_map + batch_offset(args.params, strides, rows.batch) + block * strides.column;
  int found = 0, last_head = strides.head == 0 ? rows.heads.begin : rows.heads.end - 1;
  for (int head = rows.heads.begin; head <= last_head; ++head) {
    for (int row = rows.queries.begin / kBlockSize; row <= (rows.queries.end - 1) / kBlockSize; ++row) {
      found |= map[head * strides.head + row * strides.row];
    }
  }
  return found;
}

}  // namespace flashattn::cpu
