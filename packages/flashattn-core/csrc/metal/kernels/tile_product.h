// Multiplies a SIMD group's eight rows by a tile in threadgroup memory. STRIDE: elements between the beginnings of two
// neighbouring rows of the tile.
#pragma once

#include "finite.h"
#include "fragment_loader.h"
#include "mma.h"

namespace flashattn {

// A lane's elements of a product's left operand, which has eight rows and COLUMNS columns. With KEEP, the lane keeps
// them in registers, in dtype T. Without KEEP, the lane reads them from device memory again for each tile.
template <typename T, int COLUMNS, bool KEEP>
struct LaneRow {
  const device T* source;
  RowLayout layout;
  int row, rows, column, columns;
  metal::vec<T, 2> kept[KEEP ? COLUMNS / 8 : 1];

  LaneRow() = default;
  // The arguments are those of load_pair().
  METAL_FUNC LaneRow(const device T* source, RowLayout layout, int row, int rows, int column, int columns)
      : source(source), layout(layout), row(row), rows(rows), column(column), columns(columns) {
    if constexpr (KEEP) {
      FLASHATTN_UNROLL
      for (int d = 0; d < COLUMNS / 8; ++d) {
        kept[d] = load(d);
      }
    }
  }

  METAL_FUNC metal::vec<T, 2> load(int d) const thread {
    return load_pair<COLUMNS>(source, layout, row, d * 8 + column, rows, columns);
  }
  METAL_FUNC Fragment fragment(int d) const thread {
    if constexpr (KEEP) {
      return to_fragment(kept[d]);
    } else {
      return to_fragment(load(d));
    }
  }
};

// product = left @ tile^T, for the tile's first FRAGMENTS * 8 rows.
template <int FRAGMENTS, int STRIDE, typename T, int COLUMNS, bool KEEP, typename U>
METAL_FUNC void multiply_transposed(thread Fragment* product, thread const LaneRow<T, COLUMNS, KEEP>& left,
                                    const threadgroup U* tile, uint lane) {
  int fragment_r = fragment_row(lane), fragment_c = fragment_column(lane);
  FLASHATTN_UNROLL
  for (int k = 0; k < FRAGMENTS; ++k) {
    product[k] = Fragment{0.0f, 0.0f};
  }
  FLASHATTN_UNROLL
  for (int d = 0; d < COLUMNS / 8; ++d) {
    Fragment own = left.fragment(d);
    simdgroup_barrier(metal::mem_flags::mem_none);  // keeps the compiler from loading all fragments at once
    FLASHATTN_UNROLL
    for (int k = 0; k < FRAGMENTS; ++k) {
      const threadgroup U* corner = tile + (k * 8 + fragment_c) * STRIDE + d * 8 + fragment_r;
      Fragment transposed = Fragment{float(corner[0]), float(corner[STRIDE])};
      product[k] = multiply(own, transposed, product[k]);
    }
  }
}

// sums += weights @ block, where `block` is the tile's eight rows from `rows` on. APART: if true, each block's product
// is summed apart, so that a sum of many blocks has a smaller error.
template <int COLUMNS, int STRIDE, bool APART = false, typename T>
METAL_FUNC void add_product(thread Fragment* sums, Fragment weights, const threadgroup T* rows, uint lane) {
  const threadgroup T* corner = rows + fragment_row(lane) * STRIDE + fragment_column(lane);
  FLASHATTN_UNROLL
  for (int c = 0; c < COLUMNS; ++c) {
    Fragment block = Fragment{float(corner[c * 8]), float(corner[c * 8 + 1])};
    if constexpr (APART) {
      sums[c] += multiply(weights, block, Fragment{0.0f, 0.0f});
    } else {
      sums[c] = multiply(weights, block, sums[c]);
    }
  }
}

// sums += weights @ tile, but only with the elements of the tile that are NaN or infinite, see finite.h. Such elements
// are rare, so the loop over j is not unrolled.
template <int ROWS, int COLUMNS, typename T>
METAL_FUNC void add_not_finite(thread Fragment* sums, thread const Fragment* weights, const threadgroup T* tile,
                               int stride, uint lane) {
  FLASHATTN_UNROLL
  for (int k = 0; k < ROWS / 8; ++k) {
    for (int j = 0; j < 8; ++j) {
      float weight = row_element(weights[k], j, lane);
      const threadgroup T* values = tile + (k * 8 + j) * stride + fragment_column(lane);
      FLASHATTN_UNROLL
      for (int c = 0; c < COLUMNS; ++c) {
        FLASHATTN_UNROLL
        for (int e = 0; e < 2; ++e) {
          sums[c][e] += not_finite_term(weight, float(values[c * 8 + e]));
        }
      }
    }
  }
}

// Stores a lane's elements of a row, times `factor`. COLUMNS: `columns`, rounded up to a multiple of 8.
template <int COLUMNS, typename T>
METAL_FUNC void store_row(device T* target, thread const Fragment* row, float factor, int fragment_c, int columns) {
  FLASHATTN_UNROLL
  for (int c = 0; c < COLUMNS / 8; ++c) {
    FLASHATTN_UNROLL
    for (int e = 0; e < 2; ++e) {
      int column = c * 8 + fragment_c + e;
      if (COLUMNS == columns || column < columns) {
        target[column] = T(row[c][e] * factor);
      }
    }
  }
}

}  // namespace flashattn
