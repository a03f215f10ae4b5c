// Copies rows of keys or values from device to threadgroup memory, by all threads of the threadgroup together.
#pragma once

#include "finite.h"
#include "stored_rows.h"

namespace flashattn {

template <typename T, int ROWS, int COLUMNS, int THREADS>
struct TileLoader {
  // With 16 bytes of padding per row, the rows of an 8x8 fragment start in different banks, down a column too.
  static constexpr constant int kStride = COLUMNS + 16 / int(sizeof(T));
  static constexpr constant int kSize = ROWS * kStride;
  static constexpr constant int kRun = 4;  // neighbouring elements that a thread copies at once
  static constexpr constant int kRuns = COLUMNS / kRun;
  static_assert(COLUMNS % kRun == 0, "a row is made of whole runs");

  // Rows from `rows` on, and columns from `columns` on, become 0. Returns whether all elements that this thread has
  // copied are finite.
  template <typename Source>
  METAL_FUNC static bool load(threadgroup T* tile, Source source, int rows, int columns, uint thread_index) {
    float zero = 0;  // stays 0 unless something is not finite
    for (int run = int(thread_index); run < ROWS * kRuns; run += THREADS) {
      int row = run / kRuns, column = run % kRuns * kRun;
      T elements[kRun];
      source.template load<COLUMNS, kRun>(elements, row, column, columns, row < rows);
      FLASHATTN_UNROLL
      for (int i = 0; i < kRun; ++i) {
        tile[row * kStride + column + i] = elements[i];
        zero += float(elements[i]) * 0.0f;
      }
    }
    return zero == 0;
  }

  // Replaces numbers that are not finite with 0.
  METAL_FUNC static void clean(threadgroup T* tile, uint thread_index) {
    for (int i = int(thread_index); i < ROWS * COLUMNS; i += THREADS) {
      threadgroup T& element = tile[i / COLUMNS * kStride + i % COLUMNS];
      element = T(finite_or_zero(float(element)));
    }
  }
};

}  // namespace flashattn
