// The one matrix product of the forward pass, used for the scores and for the output: a left operand that is
// read element by element, times a right operand packed so that each step of the sum reads vectors in a row.
#pragma once

#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// The left operand where it lies: element (r, k) is data[r * row_stride + k * depth_stride].
struct Left {
  const float* data;
  int64_t row_stride, depth_stride;
};

// A row-major result; row r is first multiplied by scale[r] and then added to. scale null: overwritten.
struct Result {
  float* data;
  int64_t row_stride;
  const float* scale;
};

// `Rows` rows times one panel of `Vectors` vectors of columns. All sums stay in registers.
template <int Rows, int Vectors>
static void multiply_tile(Left left, const float* panel, int depth, Result result) {
  vfloat sum[Rows][Vectors] = {};
  for (int k = 0; k < depth; ++k) {
    vfloat right[Vectors];
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      right[c] = load(panel + (k * Vectors + c) * kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      vfloat x = broadcast(left.data[r * left.row_stride + k * left.depth_stride]);
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) {
        sum[r][c] += x * right[c];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      float* target = result.data + r * result.row_stride + c * kWidth;
      store(target, result.scale ? load(target) * result.scale[r] + sum[r][c] : sum[r][c]);
    }
  }
}

template <int Vectors>
static void multiply_panel(Left left, const float* panel, int rows, int depth, Result result) {
  int row = 0;
  const auto take = [&](auto multiply, int count) {
    multiply({left.data + row * left.row_stride, left.row_stride, left.depth_stride}, panel, depth,
             {result.data + row * result.row_stride, result.row_stride, result.scale ? result.scale + row : nullptr});
    row += count;
  };
  while (rows - row >= kRows) take(multiply_tile<kRows, Vectors>, kRows);
  switch (rows - row) {
    case 5: take(multiply_tile<5, Vectors>, 5); break;
    case 4: take(multiply_tile<4, Vectors>, 4); break;
    case 3: take(multiply_tile<3, Vectors>, 3); break;
    case 2: take(multiply_tile<2, Vectors>, 2); break;
    case 1: take(multiply_tile<1, Vectors>, 1); break;
  }
}

// result (rows, columns) from left (rows, depth) and packed (depth, columns): panels of kColumns vectors, one
// behind the other, and a narrower one at the end. `columns` is a multiple of kWidth.
static void multiply(Left left, const float* packed, int rows, int depth, int columns, Result result) {
  for (int column = 0; column < columns;) {
    int vectors = smaller(kColumns, (columns - column) / kWidth);
    const float* panel = packed + int64_t{column} * depth;
    Result part = {result.data + column, result.row_stride, result.scale};
    switch (vectors) {
      case 1: multiply_panel<1>(left, panel, rows, depth, part); break;
      case 2: multiply_panel<2>(left, panel, rows, depth, part); break;
      case 3: multiply_panel<3>(left, panel, rows, depth, part); break;
      case 4: multiply_panel<4>(left, panel, rows, depth, part); break;
    }
    column += vectors * kWidth;
  }
}

// Where element (k, column) of a (depth, columns) matrix lies once it is packed.
FLASHATTN_INLINE int64_t packed_index(int k, int column, int depth, int columns) {
  constexpr int kPanel = kColumns * kWidth;
  int first = column / kPanel * kPanel;
  return int64_t{first} * depth + k * smaller(kPanel, columns - first) + (column - first);
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
