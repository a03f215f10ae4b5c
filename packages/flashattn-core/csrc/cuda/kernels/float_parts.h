// Tensor cores multiply 16-bit floats. A number that needs more bits is represented as the sum of several 16-bit parts,
// part 0 being the smallest: on compute capability 9.0 a float32 as three parts in bfloat16, and everywhere an element
// of quantised keys and values as one to three parts in the dtype of the queries. Products of two small parts are left
// out where they are below float32's rounding error.
#pragma once

#include "ptx.h"
#include "stored_rows.h"

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

// Splits `low` and `high` into sums of PARTS 16-bit floats. parts[0] is the smallest. Afterwards `low` and `high` are
// the remainders.
template <typename T, int PARTS>
FLASHATTN_FUNC void split_pair(float& low, float& high, uint (&parts)[PARTS]) {
  FLASHATTN_UNROLL
  for (int part = PARTS - 1; part >= 0; --part) {
    parts[part] = rounded_pair<T>(low, high);
    T first, second;
    first.bits = ushort(parts[part]);
    second.bits = ushort(parts[part] >> 16);
    low -= float(first);
    high -= float(second);
  }
}

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

// Where probabilities and values both have two parts: whether the product of their smaller parts is large enough to
// matter. It is up to 2^-16 of the whole in bfloat16, and up to 2^-22 in float16.
template <typename T>
constexpr bool kSmallProducts = false;
template <>
constexpr bool kSmallProducts<bfloat> = true;

// Splits 16 columns of probabilities (fragments 2 i and 2 i + 1) into PARTS matrices of 16-bit floats, which are left
// operands of products with values.
template <typename T, int PARTS, int N>
FLASHATTN_FUNC void split_step(const Fragment (&probabilities)[N], int i, uint (&parts)[PARTS][4]) {
  FLASHATTN_UNROLL
  for (int e = 0; e < 4; ++e) {
    const float* p = &probabilities[2 * i + e / 2][e % 2 * 2];
    float low = p[0], high = p[1];
    uint pairs[PARTS];
    split_pair<T>(low, high, pairs);
    FLASHATTN_UNROLL
    for (int part = 0; part < PARTS; ++part) parts[part][e] = pairs[part];
  }
}

}  // namespace flashattn
