// Tensor cores multiply 16-bit floats. A number that needs more bits is represented as the sum of several 16-bit parts,
// part 0 being the smallest: on compute capability 9.0 a float32 as three parts in bfloat16, and everywhere an element
// of quantised keys and values as one to three parts in the dtype of the queries. Products of two small parts are left
// out where they are below float32's rounding error.
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

// Whether K, the type of keys and values, means quantised ones.
template <typename K>
constexpr bool is_quantised = false;
template <>
constexpr bool is_quantised<uint> = true;

// Eight neighbouring elements of a row, from `column` on, as PARTS parts of type E. Elements beyond the row's `columns`
// columns are 0. If `exists` is false, all elements are 0.
template <typename E, int PARTS>
struct EightInParts {
  uint4 parts[PARTS];

  template <typename Rows>
  FLASHATTN_FUNC void load(Rows rows, int row, int column, int columns, bool exists) {
    float x[8];
    rows.template load<0, 8>(x, row, column, columns, exists);
    uint pairs[4][PARTS];
    FLASHATTN_UNROLL
    for (int i = 0; i < 4; ++i) split_pair<E>(x[2 * i], x[2 * i + 1], pairs[i]);
    FLASHATTN_UNROLL
    for (int p = 0; p < PARTS; ++p) parts[p] = {pairs[0][p], pairs[1][p], pairs[2][p], pairs[3][p]};
  }
};

}  // namespace flashattn
