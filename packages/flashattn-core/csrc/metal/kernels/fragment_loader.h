// Loads a lane's elements of an 8x8 fragment straight from device memory.
//
// For a row beyond the last one, loads the last row, because this needs no branch. Results for such rows are masked or
// not stored. Elements at or beyond column `columns` are 0. The template parameter COLUMNS is
// `columns`, rounded up to a multiple of 8.
#pragma once

#include "mma.h"
#include "offsets.h"

namespace flashattn {

// Elements (row, column) and (row, column + 1) of an array with `rows` rows.
template <int COLUMNS, typename T>
METAL_FUNC metal::vec<T, 2> load_pair(const device T* source, RowLayout layout, int row, int column, int rows,
                                      int columns) {
  const device T* from = source + layout.offset(metal::min(row, rows - 1), column);
  metal::vec<T, 2> pair;
  pair[0] = COLUMNS == columns || column < columns ? from[0] : T(0);
  pair[1] = COLUMNS == columns || column + 1 < columns ? from[packed_rows ? 1 : layout.column] : T(0);
  return pair;
}

// Elements (row, column) and (row + 1, column), which are neighbours in a row of the transposed matrix.
template <int COLUMNS, typename T>
METAL_FUNC metal::vec<T, 2> load_pair_transposed(const device T* source, RowLayout layout, int row, int column,
                                                 int rows, int columns) {
  bool inside = COLUMNS == columns || column < columns;
  metal::vec<T, 2> pair;
  pair[0] = inside ? source[layout.offset(metal::min(row, rows - 1), column)] : T(0);
  pair[1] = inside ? source[layout.offset(metal::min(row + 1, rows - 1), column)] : T(0);
  return pair;
}

template <typename T>
METAL_FUNC Fragment to_fragment(metal::vec<T, 2> pair) {
  return Fragment{float(pair[0]), float(pair[1])};
}

}  // namespace flashattn
