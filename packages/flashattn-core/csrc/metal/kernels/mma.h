// 8x8 matrices spread over a SIMD group. As on Apple's GPUs, a lane holds two neighbouring elements of one row. Bits 4,
// 2 and 1 of the lane's index form the row's number. Bits 3 and 0 form half of the first element's column.
// All fragments are float32, whatever the arrays' dtype, and products accumulate in float32.
#pragma once

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

#include "dialect.h"

namespace flashattn {

typedef float2 Fragment;  // a lane's two elements

METAL_FUNC int fragment_row(uint lane) {
  return int((lane >> 1 & 3) | (lane >> 2 & 4));
}
METAL_FUNC int fragment_column(uint lane) {
  return int((lane & 1) * 2 | (lane >> 3 & 1) * 4);
}

// The lane that holds the element (row, column).
METAL_FUNC ushort fragment_lane(int row, int column) {
  return ushort((column >> 1 & 1) | (row & 3) << 1 | (column >> 2 & 1) << 3 | (row >> 2 & 1) << 4);
}

// accumulator + left @ right
METAL_FUNC Fragment multiply(Fragment left, Fragment right, Fragment accumulator) {
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

// Returns the element in this lane's row and the given column. Another lane may hold it.
METAL_FUNC float row_element(Fragment fragment, int column, uint lane) {
  ushort holder = fragment_lane(fragment_row(lane), column);
  float even = metal::simd_shuffle(fragment.x, holder), odd = metal::simd_shuffle(fragment.y, holder);
  return column % 2 == 0 ? even : odd;
}

// Both functions reduce a number over the four lanes that hold the same row.
METAL_FUNC float across_row_max(float x) {
  x = metal::max(x, metal::simd_shuffle_xor(x, ushort(1)));
  return metal::max(x, metal::simd_shuffle_xor(x, ushort(8)));
}
METAL_FUNC float across_row_sum(float x) {
  x += metal::simd_shuffle_xor(x, ushort(1));
  return x + metal::simd_shuffle_xor(x, ushort(8));
}

}  // namespace flashattn
