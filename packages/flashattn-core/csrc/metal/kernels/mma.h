// 8x8 matrices spread over a SIMD group. A lane holds two neighbouring elements of one row, as Apple's GPUs lay them
// out:   row = lane bits 4 2 1,   column = lane bits 3 0, times two
// Arithmetic is float32 whatever the storage: products of float32 fragments, accumulated in float32.
#pragma once

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

#include "variant.h"

namespace flashattn {

typedef float2 Fragment;  // a lane's two elements

inline int fragment_row(uint lane) {
  return int((lane >> 1 & 3) | (lane >> 2 & 4));
}
inline int fragment_column(uint lane) {
  return int((lane & 1) * 2 | (lane >> 3 & 1) * 4);
}

// The lane that holds an element.
inline ushort fragment_lane(int row, int column) {
  return ushort((column >> 1 & 1) | (row & 3) << 1 | (column >> 2 & 1) << 3 | (row >> 2 & 1) << 4);
}

// accumulator + left @ right
inline Fragment multiply(Fragment left, Fragment right, Fragment accumulator) {
  metal::simdgroup_float8x8 a, b, c;
  a.thread_elements()[0] = left.x;
  a.thread_elements()[1] = left.y;
  b.thread_elements()[0] = right.x;
  b.thread_elements()[1] = right.y;
  c.thread_elements()[0] = accumulator.x;
  c.thread_elements()[1] = accumulator.y;
  metal::simdgroup_multiply_accumulate(c, a, b, c);
  return Fragment{c.thread_elements()[0], c.thread_elements()[1]};
}

inline float finite_or_zero(float x) {
  return x - x == 0 ? x : 0.0f;
}

// The same for probabilities and values where a value may be NaN or infinite: those reach the rows that see their key,
// and not the others through a probability of 0. Slow, and rare.
inline Fragment multiply_visible(Fragment probability, Fragment value, Fragment accumulator, uint lane) {
  Fragment finite = Fragment{finite_or_zero(value.x), finite_or_zero(value.y)};
  accumulator = multiply(probability, finite, accumulator);
  int row = fragment_row(lane), column = fragment_column(lane);
  for (int key = 0; key < 8; ++key) {
    ushort holder = fragment_lane(row, key);
    float even = metal::simd_shuffle(probability.x, holder), odd = metal::simd_shuffle(probability.y, holder);
    float weight = key % 2 == 0 ? even : odd;
    ushort value_holder = fragment_lane(key, column);
    Fragment v = Fragment{metal::simd_shuffle(value.x, value_holder), metal::simd_shuffle(value.y, value_holder)};
    accumulator.x += weight == 0 || v.x - v.x == 0 ? 0.0f : weight * v.x;
    accumulator.y += weight == 0 || v.y - v.y == 0 ? 0.0f : weight * v.y;
  }
  return accumulator;
}

// Over the lanes that hold the same row.
inline float across_row_max(float x) {
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(1)));
  return metal::max(x, metal::simd_shuffle_xor(x, ushort(8)));
}
inline float across_row_sum(float x) {
  x += metal::simd_shuffle_xor(x, ushort(1));
  return x + metal::simd_shuffle_xor(x, ushort(8));
}

}  // namespace flashattn
