// Offsets of batch elements, heads and rows in an array.
#pragma once

#include "call/params.h"
#include "dialect.h"

namespace flashattn {

// The offset of a batch element. batch: its number in row-major order. The usual case of one batch dimension needs no
// division. For more dimensions, a rolled loop keeps the code short.
FLASHATTN_FUNC int64_t batch_offset(FLASHATTN_UNIFORM AttentionParams& params, FLASHATTN_UNIFORM Strides& strides,
                                    int batch) {
  int64_t offset = 0;
  FLASHATTN_ROLLED
  for (int d = params.batch_dims - 1; d > 0; --d) {
    offset += batch % params.batch_shape[d] * strides.batch[d];
    batch /= params.batch_shape[d];
  }
  return offset + batch * strides.batch[0];
}

// A pointer to the first row of a head of an input.
template <typename T>
FLASHATTN_FUNC const FLASHATTN_DEVICE T* head_of(const FLASHATTN_DEVICE T* tensor,
                                                 FLASHATTN_UNIFORM AttentionParams& params,
                                                 FLASHATTN_UNIFORM Strides& strides, int batch, int head) {
  return tensor + batch_offset(params, strides, batch) + head * strides.head;
}

// A pointer to a row of an output.
template <typename T>
FLASHATTN_FUNC FLASHATTN_DEVICE T* row_of(FLASHATTN_DEVICE T* tensor, FLASHATTN_UNIFORM AttentionParams& params,
                                          FLASHATTN_UNIFORM Strides& strides, int batch, int head, int row) {
  return tensor + batch_offset(params, strides, batch) + head * strides.head + row * strides.row;
}

// Reads an element of an array. dtype: the number of the array's dtype in call/dtype.h. It is a compile-time constant
// of the kernel.
FLASHATTN_FUNC float load_float(const FLASHATTN_DEVICE uchar* array, int dtype, int64_t index) {
  return dtype == 0   ? reinterpret_cast<const FLASHATTN_DEVICE float*>(array)[index]
         : dtype == 1 ? float(reinterpret_cast<const FLASHATTN_DEVICE half*>(array)[index])
                      : float(reinterpret_cast<const FLASHATTN_DEVICE bfloat*>(array)[index]);
}
FLASHATTN_FUNC int size_of_dtype(int dtype) {
  return dtype == 0 ? int(sizeof(float)) : int(sizeof(half));
}

// Strides within a head of an array, in elements.
struct RowLayout {
  int64_t row;
  int64_t column;

  FLASHATTN_FUNC int64_t offset(int r, int c) const FLASHATTN_THREAD { return r * row + c * column; }
};

FLASHATTN_FUNC RowLayout row_layout(FLASHATTN_UNIFORM Strides& strides) {
  return RowLayout{strides.row, packed_rows ? 1 : strides.column};
}

}  // namespace flashattn
