// The threads of a threadgroup copy rows together, from device memory to threadgroup memory.
#pragma once

#include "finite.h"
#include "stored_rows.h"

namespace flashattn {

// Sets the SIMD group's flag if `condition` is true in all of its threads. Otherwise clears the flag.
METAL_FUNC void set_flag(threadgroup int* flags, bool condition, uint lane, uint simdgroup) {
  bool in_all = metal::simd_all(condition);
  if (lane == 0) {
    flags[simdgroup] = in_all;
  }
}
// Whether all of COUNT flags are set.
template <int COUNT>
METAL_FUNC bool all_true(const threadgroup int* flags) {
  bool result = true;
  FLASHATTN_UNROLL
  for (int s = 0; s < COUNT; ++s) {
    result = result && flags[s] != 0;
  }
  return result;
}

template <typename T, int ROWS, int COLUMNS, int THREADS>
struct TileLoader {
  // Each row has 16 bytes of padding. They put an 8x8 fragment's rows, and a column's elements, into different banks.
  static constexpr constant int kStride = COLUMNS + 16 / int(sizeof(T));
  static constexpr constant int kSize = ROWS * kStride;
  static constexpr constant int kRun = 4;  // how many neighbouring elements a thread copies at once
  static constexpr constant int kRuns = COLUMNS / kRun;
  static_assert(COLUMNS % kRun == 0, "a row is made of whole runs");

  // Fills the tile from `source`. Rows from `rows` on, and columns from `columns` on, become 0. Returns whether all
  // elements that this thread copied are finite.
  template <typename Source>
  METAL_FUNC static bool load(threadgroup T* tile, Source source, int rows, int columns, uint thread_index) {
    float zero = 0;  // stays 0 unless an element is NaN or infinite: then it becomes NaN
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

  // Replaces NaN and infinity in the tile by 0.
  METAL_FUNC static void clean(threadgroup T* tile, uint thread_index) {
    for (int i = int(thread_index); i < ROWS * COLUMNS; i += THREADS) {
      threadgroup T& element = tile[i / COLUMNS * kStride + i % COLUMNS];
      element = T(finite_or_zero(float(element)));
    }
  }
};

}  // namespace flashattn
