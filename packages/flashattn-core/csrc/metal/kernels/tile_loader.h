// Rows of keys or values from device to threadgroup memory, by all threads of the threadgroup together.
#pragma once

#include "arguments.h"

namespace flashattn {

template <typename T, int ROWS, int COLUMNS, int THREADS>
struct TileLoader {
  // 16 bytes of padding a row: the rows of an 8x8 fragment then start in different banks, down a column too.
  static constexpr constant int kStride = COLUMNS + 16 / int(sizeof(T));
  static constexpr constant int kSize = ROWS * kStride;
  static constexpr constant int kRun = 4;  // neighbouring elements that a thread copies at once
  static constexpr constant int kRuns = COLUMNS / kRun;
  static_assert(COLUMNS % kRun == 0, "a row is made of whole runs");

  // Rows from `rows` on, and columns from `columns` on, become 0. Returns whether the elements that this thread has
  // copied are all finite.
  static bool load(threadgroup T* tile, const device T* source, RowLayout layout, int rows, int columns,
                   uint thread_index) {
    float zero = 0;  // stays 0 unless something is not finite
    for (int run = int(thread_index); run < ROWS * kRuns; run += THREADS) {
      int row = run / kRuns, column = run % kRuns * kRun;
      FLASHATTN_UNROLL
      for (int i = 0; i < kRun; ++i) {
        bool inside = row < rows && (COLUMNS == columns || column + i < columns);
        T element = inside ? source[layout.offset(row, column + i)] : T(0);
        tile[row * kStride + column + i] = element;
        zero += float(element) * 0.0f;
      }
    }
    return zero == 0;
  }
};

}  // namespace flashattn
