// Where a batch element begins in an array, and which keys its key range leaves.
#pragma once

#include "../call/spans.h"
#include "forward.h"

namespace flashattn::cpu {

// Offset of one batch element, counted through the leading dimensions from the last to the first.
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

}  // namespace flashattn::cpu
