// The arrays of one call, bound as in launch.h, and where in them a batch element begins.
#pragma once

#include "../../params.h"
#include "variant.h"

#define FLASHATTN_PARAMS const constant AttentionParams& params [[buffer(5)]]

#define FLASHATTN_TENSORS(T) \
  const device T *query [[buffer(0)]], const device T *key [[buffer(1)]], const device T *value [[buffer(2)]]

#define FLASHATTN_OUTPUTS(T) device T *out [[buffer(3)]], device float *lse [[buffer(4)]]

// Bound only where the call has them.
#define FLASHATTN_OPTIONAL_INPUTS                                                \
  const device int *key_start [[buffer(6), function_constant(has_key_start)]],   \
      const device int *key_stop [[buffer(7), function_constant(has_key_stop)]], \
      const device uint *tree [[buffer(8), function_constant(has_tree)]],        \
      const device bool *visible [[buffer(9), function_constant(has_visible)]],  \
      const device uchar *bias [[buffer(10), function_constant(has_bias)]],      \
      const device float *alibi_slopes [[buffer(12), function_constant(has_alibi)]]

#define FLASHATTN_SINKS const device float* sinks [[buffer(11), function_constant(has_sinks)]]

namespace flashattn {

// Offset of one batch element, counted through the leading dimensions from the last to the first. One leading
// dimension, the usual case, costs no division.
METAL_FUNC int64_t batch_offset(const constant AttentionParams& params, const constant Strides& strides, int batch) {
  int64_t offset = 0;
  for (int d = params.batch_dims - 1; d > 0; --d) {
    offset += batch % params.batch_shape[d] * strides.batch[d];
    batch /= params.batch_shape[d];
  }
  return offset + batch * strides.batch[0];
}

// Where the keys or values of one key/value head begin.
template <typename T>
METAL_FUNC const device T* head_of(const device T* tensor, const constant AttentionParams& params,
                                   const constant Strides& strides, int batch, int head) {
  return tensor + batch_offset(params, strides, batch) + head * strides.head;
}

// Where a row of an output begins.
template <typename T>
METAL_FUNC device T* row_of(device T* tensor, const constant AttentionParams& params, const constant Strides& strides,
                            int batch, int head, int row) {
  return tensor + batch_offset(params, strides, batch) + head * strides.head + row * strides.row;
}

// Steps between the elements of a tensor's rows, in elements.
struct RowLayout {
  int64_t row;
  int64_t column;

  METAL_FUNC int64_t offset(int r, int c) const thread { return r * row + c * column; }
};

METAL_FUNC RowLayout row_layout(const constant Strides& strides) {
  return RowLayout{strides.row, packed_rows ? 1 : strides.column};
}

}  // namespace flashattn
