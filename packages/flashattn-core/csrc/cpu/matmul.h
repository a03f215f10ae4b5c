// The one matrix product of the forward pass, used for Q·Kᵀ and for P·V: a tall left operand, row by row
// in memory, times a panel packed so that each step of the sum reads kWidth * vectors floats in a row.
#pragma once

#include "dtype.h"
#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// out[r, :] = out_scale[r] * out[r, :] + left[r, :] · panel, for `Rows` rows and `Vectors` vectors of
// columns; out_scale null: out is overwritten. All accumulators stay in registers.
template <int Rows, int Vectors>
static void multiply_tile(const float* left, int64_t left_stride, const float* panel, int depth, const float* out_scale,
                          float* out, int64_t out_stride) {
  vfloat sum[Rows][Vectors] = {};
  if (out_scale) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) {
        sum[r][c] = load(out + r * out_stride + c * kWidth) * out_scale[r];
      }
    }
  }
  for (int k = 0; k < depth; ++k) {
    vfloat right[Vectors];
#pragma GCC unroll 4
    for (int c = 0; c < Vectors; ++c) {
      right[c] = load(panel + (k * Vectors + c) * kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      vfloat x = broadcast(left[r * left_stride + k]);
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
      store(out + r * out_stride + c * kWidth, sum[r][c]);
    }
  }
}

template <int Vectors>
static void multiply_panel(const float* left, int64_t left_stride, const float* panel, int rows, int depth,
                           const float* out_scale, float* out, int64_t out_stride) {
  int row = 0;
  auto tile = [&](auto multiply, int tile_rows) {
    multiply(left + row * left_stride, left_stride, panel, depth, out_scale ? out_scale + row : nullptr,
             out + row * out_stride, out_stride);
    row += tile_rows;
  };
  while (rows - row >= kRows) tile(multiply_tile<kRows, Vectors>, kRows);
  switch (rows - row) {
    case 5: tile(multiply_tile<5, Vectors>, 5); break;
    case 4: tile(multiply_tile<4, Vectors>, 4); break;
    case 3: tile(multiply_tile<3, Vectors>, 3); break;
    case 2: tile(multiply_tile<2, Vectors>, 2); break;
    case 1: tile(multiply_tile<1, Vectors>, 1); break;
  }
}

// All columns: panels of kColumns vectors, packed one behind the other, and one narrower panel at the end.
// `columns` is a multiple of kWidth.
static void multiply(const float* left, int64_t left_stride, const float* packed, int rows, int depth, int columns,
                     const float* out_scale, float* out, int64_t out_stride) {
  for (int column = 0; column < columns;) {
    int vectors = smaller(kColumns, (columns - column) / kWidth);
    auto* panel = packed + int64_t{column} * depth;
    auto* target = out + column;
    switch (vectors) {
      case 1: multiply_panel<1>(left, left_stride, panel, rows, depth, out_scale, target, out_stride); break;
      case 2: multiply_panel<2>(left, left_stride, panel, rows, depth, out_scale, target, out_stride); break;
      case 3: multiply_panel<3>(left, left_stride, panel, rows, depth, out_scale, target, out_stride); break;
      case 4: multiply_panel<4>(left, left_stride, panel, rows, depth, out_scale, target, out_stride); break;
    }
    column += vectors * kWidth;
  }
}

// Packs a (depth, columns) matrix, given by its strides, for multiply(): panel after panel, in each panel
// row after row. Columns from `columns` to `padded_columns` become 0. Returns whether every element is
// finite: NaN or infinity in a hidden key must not reach an output through 0 * NaN.
template <typename T>
static bool pack(const T* source, int64_t depth_stride, int64_t column_stride, int depth, int columns,
                 int padded_columns, float* packed) {
  bool finite = true;
  for (int first = 0; first < padded_columns;) {
    int width = smaller(kColumns * kWidth, padded_columns - first);
    int filled = larger(0, smaller(width, columns - first));
    for (int k = 0; k < depth; ++k) {
      const T* row = source + k * depth_stride + first * column_stride;
      float* target = packed + int64_t{first} * depth + k * width;
      if (column_stride == 1) {
        for (int c = 0; c < filled; ++c) target[c] = to_float(row[c]);
      } else {
        for (int c = 0; c < filled; ++c) target[c] = to_float(row[c * column_stride]);
      }
      for (int c = filled; c < width; ++c) target[c] = 0;
      for (int c = 0; c < filled; ++c) finite &= (to_bits(target[c]) & 0x7f800000u) != 0x7f800000u;
    }
    first += width;
  }
  return finite;
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
