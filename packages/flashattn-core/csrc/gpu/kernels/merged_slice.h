// Merges a row's partial results, each of which covers a part of the keys. Each thread merges some columns of the row.
#pragma once

#include "online_softmax.h"

namespace flashattn {

// Neighbouring columns of a row, which a thread loads at once. A row has kSlices slices.
constexpr int kSlice = value_dim % 4 == 0 ? 4 : 1, kSlices = value_dim / kSlice;
struct alignas(kSlice * sizeof(float)) Slice {
  float columns[kSlice];
};

// A slice of a row, merged over several parts of the keys.
struct MergedSlice {
  OnlineSoftmax softmax = empty_row();
  Slice slice = {};

  // Adds `parts` partial results, and loads AT_ONCE of them at a time. result_of(part, softmax, slice) reads the
  // partial result with number `part`.
  template <int AT_ONCE, typename F>
  FLASHATTN_FUNC void merge(int parts, F result_of) {
    for (int first = 0; first < parts; first += AT_ONCE) {
      OnlineSoftmax softmaxes[AT_ONCE];
      Slice slices[AT_ONCE];
      float largest = -INFINITY;
      FLASHATTN_UNROLL
      for (int n = 0; n < AT_ONCE; ++n) {
        softmaxes[n] = empty_row();
        slices[n] = Slice{};
        if (first + n < parts) result_of(first + n, softmaxes[n], slices[n]);
      }
      FLASHATTN_UNROLL
      for (int n = 0; n < AT_ONCE; ++n) largest = maximum(largest, softmaxes[n].row_max);
      float rescale = softmax.raise(largest);
      FLASHATTN_UNROLL
      for (int i = 0; i < kSlice; ++i) slice.columns[i] *= rescale;
      FLASHATTN_UNROLL
      for (int n = 0; n < AT_ONCE; ++n) {
        float weight = softmax.probability(softmaxes[n].row_max);
        softmax.row_sum += weight * softmaxes[n].row_sum;
        FLASHATTN_UNROLL
        for (int i = 0; i < kSlice; ++i) slice.columns[i] += weight * slices[n].columns[i];
      }
    }
  }
};

}  // namespace flashattn
