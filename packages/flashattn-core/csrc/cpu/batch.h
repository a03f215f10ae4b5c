// Where a batch element begins in an array.
#pragma once

#include "../params.h"

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

}  // namespace flashattn::cpu
