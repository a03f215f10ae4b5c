// A lane's elements of an 8x8 fragment, straight from device memory.
#pragma once

#include "arguments.h"
#include "mma.h"

namespace flashattn {

// Elements (row, column) and (row, column + 1). Those from row `rows` or column `columns` on are 0. COLUMNS: `columns`
// rounded up to whole fragments.
template <int COLUMNS, typename T>
inline metal::vec<T, 2> load_pair(const device T* source, RowLayout layout, int row, int column, int rows,
                                  int columns) {
  bool first = row < rows && (COLUMNS == columns || column < columns);
  bool second = row < rows && (COLUMNS == columns || column + 1 < columns);
  metal::vec<T, 2> pair;
  pair[0] = first ? source[layout.offset(row, column)] : T(0);
  pair[1] = second ? source[layout.offset(row, column + 1)] : T(0);
  return pair;
}

// Elements (row, column) and (row + 1, column): those of the transposed matrix.
template <int COLUMNS, typename T>
inline metal::vec<T, 2> load_pair_transposed(const device T* source, RowLayout layout, int row, int column, int rows,
                                             int columns) {
  bool inside = COLUMNS == columns || column < columns;
  metal::vec<T, 2> pair;
  pair[0] = inside && row < rows ? source[layout.offset(row, column)] : T(0);
  pair[1] = inside && row + 1 < rows ? source[layout.offset(row + 1, column)] : T(0);
  return pair;
}

template <typename T>
inline Fragment to_fragment(metal::vec<T, 2> pair) {
  return Fragment{float(pair[0]), float(pair[1])};
}

}  // namespace flashattn
