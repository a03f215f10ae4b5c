// What a warpgroup, four warps with 64 rows, does with a tile of keys: the two products of tile_products.h on the
// tensor cores of compute capability 9.0. They run on while the warpgroup goes on, and read their second operand, and
// the first where it is not in registers, from shared memory.
//
// A warp has its 16 rows of the result as mma.sync gives them, see tile_products.h.
#pragma once

#include "ptx_hopper.h"
#include "tile_products.h"

namespace flashattn {

constexpr int kWarpgroup = 4 * FLASHATTN_LANES, kWarpgroupRows = 4 * kWarpRows;

// Begins scores = the warpgroup's rows of `queries`, from first_row on, times all of `keys`.
template <typename T, int ROWS, int KEYS, int D>
FLASHATTN_FUNC void begin_multiply_keys(Fragment (&scores)[KEYS / 8], SharedTile<T, ROWS, D> queries, int first_row,
                                        SharedTile<T, KEYS, D> keys) {
  Descriptor a = descriptor(queries.memory + first_row * 128, 0), b = descriptor(keys.memory, 0);
  FLASHATTN_UNROLL
  for (int step = 0; step < (head_dim + 15) / 16; ++step) {
    int a_step = step / 4 * queries.kPanel + step % 4 * 32, b_step = step / 4 * keys.kPanel + step % 4 * 32;
    Product<T, KEYS>::of_rows(scores, a + (a_step >> 4), b + (b_step >> 4), step != 0);
  }
  commit_products();
}

// Probabilities as two 16-bit parts: the first operand of a product with values.
template <int KEYS>
struct TwoParts {
  uint large[KEYS / 16][4], small[KEYS / 16][4];

  template <typename T>
  FLASHATTN_FUNC void split(const Fragment (&probabilities)[KEYS / 8]) {
    FLASHATTN_UNROLL
    for (int i = 0; i < KEYS / 16; ++i) {
      FLASHATTN_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float* p = &probabilities[2 * i + e / 2][e % 2 * 2];
        split_pair<T>(p[0], p[1], large[i][e], small[i][e]);
      }
    }
  }
};

// Begins output += probabilities times `values`. PARTS: 1 leaves the small ones out.
template <int PARTS, typename T, int KEYS, int DV>
FLASHATTN_FUNC void begin_add_values(Fragment (&output)[DV / 8], const TwoParts<KEYS>& probabilities,
                                     SharedTile<T, KEYS, DV> values) {
  constexpr int kColumns = DV % 128 == 0 ? 128 : 64;  // of an instruction
  Descriptor b = descriptor(values.memory, values.kPanel);
  FLASHATTN_UNROLL
  for (int i = 0; i < KEYS / 16; ++i) {
    FLASHATTN_UNROLL
    for (int column = 0; column < DV; column += kColumns) {
      Descriptor rows = b + ((i * 16 * 128 + column / 64 * values.kPanel) >> 4);
      if (PARTS == 2) Product<T, kColumns>::of_columns(&output[column / 8], probabilities.small[i], rows);
      Product<T, kColumns>::of_columns(&output[column / 8], probabilities.large[i], rows);
    }
  }
  commit_products();
}

}  // namespace flashattn
