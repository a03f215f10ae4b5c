// What a warpgroup, with 64 rows, does with a tile of keys: the two products of tile_products.h, with the lanes' parts
// of rows as there. They run on while the warpgroup goes on, and read from shared memory what is not in registers.
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

// Begins output += probabilities times `values`. large, small: split_step()'s. PARTS: 1 leaves the small ones out.
template <int PARTS, typename T, int KEYS, int DV>
FLASHATTN_FUNC void begin_add_values(Fragment (&output)[DV / 8], const uint (&large)[KEYS / 16][4],
                                     const uint (&small)[KEYS / 16][4], SharedTile<T, KEYS, DV> values) {
  constexpr int kColumns = DV % 128 == 0 ? 128 : 64;  // of an instruction
  Descriptor b = descriptor(values.memory, values.kPanel);
  FLASHATTN_UNROLL
  for (int i = 0; i < KEYS / 16; ++i) {
    FLASHATTN_UNROLL
    for (int column = 0; column < DV; column += kColumns) {
      Descriptor rows = b + ((i * 16 * 128 + column / 64 * values.kPanel) >> 4);
      if (PARTS == 2) Product<T, kColumns>::of_columns(&output[column / 8], small[i], rows);
      Product<T, kColumns>::of_columns(&output[column / 8], large[i], rows);
    }
  }
  commit_products();
}

}  // namespace flashattn
