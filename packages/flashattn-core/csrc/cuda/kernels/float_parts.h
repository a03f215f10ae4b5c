// On compute capability 9.0, tensor cores multiply 16-bit floats. A float32 is represented as the sum of three bfloat16
// parts, part 0 being the smallest. Products of two small parts are left out: they are below float32's rounding error.
#pragma once

#include "stored_rows.h"
#include "tile_products.h"

namespace flashattn {

template <typename T>
struct Operand {
  using Element = T;
  static constexpr int kParts = 1;
};
template <>
struct Operand<float> {
  using Element = bfloat;
  static constexpr int kParts = 3;
};

// Splits eight neighbouring float32 elements of a row, from `column` on, into three bfloat16 parts. Elements beyond the
// row's `columns` columns are 0. If `exists` is false, all elements are 0.
struct EightInParts {
  uint4 parts[Operand<float>::kParts];

  FLASHATTN_FUNC EightInParts(PlainRows<const float*> rows, int row, int column, int columns, bool exists) {
    float x[8];
    rows.template load<0, 8>(x, row, column, columns, exists);
    uint pairs[4][Operand<float>::kParts];
    FLASHATTN_UNROLL
    for (int i = 0; i < 4; ++i) split_pair<bfloat>(x[2 * i], x[2 * i + 1], pairs[i]);
    FLASHATTN_UNROLL
    for (int p = 0; p < Operand<float>::kParts; ++p) parts[p] = {pairs[0][p], pairs[1][p], pairs[2][p], pairs[3][p]};
  }
};

}  // namespace flashattn
