// The two products of a warp's 16 rows with a tile of keys: scores = query @ key^T, and output += probabilities @
// value. Tensor cores reach the accuracy of float32, unless a probability is rounded to one 16-bit float. Products of
// 16-bit floats are exact, and the sum of two such floats represents a probability. A float32 is the sum of two TF32
// numbers, and the product of two float32 is the sum of three TF32 products. For scores, the two smaller products have
// a separate sum, because tensor cores truncate sums.
//
// Lane n has rows n / 4 and n / 4 + 8 of scores and output. It has columns 8 j + 2 (n % 4) + {0, 1} of the scores, for
// every j.
#pragma once

#include "finite.h"
#include "float_parts.h"
#include "shared_tile.h"

namespace flashattn {

constexpr int kWarpRows = 16;

// Splits floats, whose bits are in `a`, into sums a + b. The new a is rounded to TF32, and b is the rounding error.
FLASHATTN_FUNC void split_tf32(uint (&a)[4], uint (&b)[4]) {
  FLASHATTN_UNROLL
  for (int e = 0; e < 4; ++e) {
    float x = __uint_as_float(a[e]);
    a[e] = (a[e] + 0x1000u) & 0xffffe000u;
    b[e] = __float_as_uint(x - __uint_as_float(a[e]));
  }
}

// Returns the tile without the rows before `first`, which must be a multiple of 8.
template <typename T, int ROWS, int COLUMNS>
FLASHATTN_FUNC SharedTile<T, ROWS, COLUMNS> own_rows(SharedTile<T, ROWS, COLUMNS> tile, int first) {
  return {tile.memory + first * 128};
}

// scores += a b^T, where a is the first 16 rows of `queries`, and b is all of `keys`.
template <typename T, int ROWS, int KEYS, int D>
FLASHATTN_FUNC void multiply_keys(Fragment (&scores)[KEYS / 8], SharedTile<T, ROWS, D> queries,
                                  SharedTile<T, KEYS, D> keys, int lane) {
  constexpr bool kIsFloat = sizeof(T) == 4;
  Fragment small[kIsFloat ? KEYS / 8 : 1] = {};
  uint of_query = queries.lane_offset(lane % 16, lane / 16);
  uint of_key = keys.lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  FLASHATTN_UNROLL
  for (int step = 0; step < queries.kPieces / 2; ++step) {
    uint a[4], a_small[4];
    load_matrices(a, queries.piece_at(of_query, 0, step));
    if constexpr (kIsFloat) split_tf32(a, a_small);
    FLASHATTN_UNROLL
    for (int j = 0; j < KEYS / 8; j += 2) {
      uint b[4], b_small[4];
      load_matrices(b, keys.piece_at(of_key, j * 8, step));
      if constexpr (kIsFloat) {
        split_tf32(b, b_small);
        multiply_add_tile<T>(small[j], a_small, b[0], b[1]);
        multiply_add_tile<T>(small[j + 1], a_small, b[2], b[3]);
        multiply_add_tile<T>(small[j], a, b_small[0], b_small[1]);
        multiply_add_tile<T>(small[j + 1], a, b_small[2], b_small[3]);
      }
      multiply_add_tile<T>(scores[j], a, b[0], b[1]);
      multiply_add_tile<T>(scores[j + 1], a, b[2], b[3]);
    }
  }
  if constexpr (kIsFloat) {
    FLASHATTN_UNROLL
    for (int i = 0; i < KEYS / 2; ++i) scores[i / 4][i % 4] += small[i / 4][i % 4];
  }
}

// The output column of element 0 in a lane's fragment c. Element 1 is in the column kNext columns further right. For
// float32, a lane loads 16 bytes of a value at a time, so it has eight neighbouring columns of every 32.
template <typename T>
FLASHATTN_FUNC int output_column(int c, int lane) {
  return sizeof(T) == 4 ? c / 4 * 32 + lane % 4 * 8 + c % 4 : c * 8 + lane % 4 * 2;
}
template <typename T>
constexpr int kNext = sizeof(T) == 4 ? 4 : 1;

// output += probabilities times values. PARTS: how many 16-bit floats represent a probability. If it is 1,
// probabilities are rounded.
template <int PARTS, typename T, int KEYS, int DV>
FLASHATTN_FUNC void add_values(Fragment (&output)[DV / 8], const Fragment (&probabilities)[KEYS / 8],
                               SharedTile<T, KEYS, DV> values, int lane) {
  if constexpr (sizeof(T) == 2) {
    uint of_value = values.lane_offset(lane % 16, lane / 16);
    FLASHATTN_UNROLL
    for (int i = 0; i < KEYS / 16; ++i) {
      uint a[PARTS][4];
      split_step<T>(probabilities, i, a);
      FLASHATTN_UNROLL
      for (int c = 0; c < DV / 8; c += 2) {
        uint b[4];
        load_matrices_transposed(b, values.piece_at(of_value, i * 16, c / 2));
        FLASHATTN_UNROLL
        for (int part = 0; part < PARTS; ++part) {
          multiply_add_tile<T>(output[c], a[part], b[0], b[1]);
          multiply_add_tile<T>(output[c + 1], a[part], b[2], b[3]);
        }
      }
    }
  } else {
    // The keys are summed in the order in which lanes hold their scores. So lanes need not exchange probabilities.
    FLASHATTN_UNROLL
    for (int j = 0; j < DV / 32; ++j) {
      Fragment sums[4] = {};  // the sums over this tile only, because tensor cores truncate the terms of long sums
      FLASHATTN_UNROLL
      for (int i = 0; i < KEYS / 8; ++i) {
        uint a[4], a_small[4];
        FLASHATTN_UNROLL
        for (int e = 0; e < 4; ++e) a[e] = __float_as_uint(probabilities[i][e % 2 * 2 + e / 2]);
        split_tf32(a, a_small);
        uint b0[4], b1[4], b0_small[4], b1_small[4];
        load_four(b0, values.piece(i * 8 + lane % 4 * 2, j * 8 + lane / 4));
        load_four(b1, values.piece(i * 8 + lane % 4 * 2 + 1, j * 8 + lane / 4));
        split_tf32(b0, b0_small);
        split_tf32(b1, b1_small);
        FLASHATTN_UNROLL
        for (int c = 0; c < 4; ++c) multiply_add_tile<T>(sums[c], a_small, b0[c], b1[c]);
        FLASHATTN_UNROLL
        for (int c = 0; c < 4; ++c) multiply_add_tile<T>(sums[c], a, b0_small[c], b1_small[c]);
        FLASHATTN_UNROLL
        for (int c = 0; c < 4; ++c) multiply_add_tile<T>(sums[c], a, b0[c], b1[c]);
      }
      FLASHATTN_UNROLL
      for (int c = 0; c < 16; ++c) output[4 * j + c / 4][c % 4] += sums[c / 4][c % 4];
    }
  }
}

}  // namespace flashattn
