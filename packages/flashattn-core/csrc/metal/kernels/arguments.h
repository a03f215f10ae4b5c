// The arrays of one call, bound as in launch.h, and where in them a batch element begins.
#pragma once

#include "../../call/params.h"
#include "variant.h"

#define FLASHATTN_PARAMS const constant AttentionParams& params [[buffer(5)]]

#define FLASHATTN_TENSORS(T, K) \
  const device T *query [[buffer(0)]], const device K *key [[buffer(1)]], const device K *value [[buffer(2)]]

// Bound only where key and value are quantised: words of those, then.
#define FLASHATTN_QUANTISED_INPUTS                                                      \
  const device uchar *key_scales [[buffer(26), function_constant(is_quantised)]],       \
      const device uchar *key_biases [[buffer(27), function_constant(is_quantised)]],   \
      const device uchar *value_scales [[buffer(28), function_constant(is_quantised)]], \
      const device uchar *value_biases [[buffer(29), function_constant(is_quantised)]], \
      const constant QuantParams *quant [[buffer(30), function_constant(is_quantised)]]

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

// An element of an array whose dtype, Dtype of launch.h, is a function constant.
METAL_FUNC float load_float(const device uchar* array, int dtype, int64_t index) {
  return dtype == 1   ? reinterpret_cast<const device float*>(array)[index]
         : dtype == 2 ? float(reinterpret_cast<const device half*>(array)[index])
                      : float(reinterpret_cast<const device bfloat*>(array)[index]);
}
METAL_FUNC int size_of_dtype(int dtype) {
  return dtype == 1 ? int(sizeof(float)) : int(sizeof(half));
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
