// The two products of tile_products.h, for a warpgroup with 64 rows and a tile of keys. Each warp has 16 of the rows,
// and its lanes have the same rows and columns as in tile_products.h. The products run asynchronously, and read their
// operands from shared memory or registers.
#pragma once

#include "ptx_hopper.h"
#include "tile_products.h"

namespace flashattn {

constexpr int kWarpgroup = 4 * FLASHATTN_LANES, kWarpgroupRows = 4 * kWarpRows;

// Starts to multiply the warpgroup's queries, from first_row on, by the tile's keys. COLUMNS: the operands' columns,
// without the padding of panels.
// Queries are split into PARTS parts, and keys into one part or more, see float_parts.h. A call multiplies part
// key_part of the keys by parts PARTS - 1 - key_part to PARTS - 1 of the queries, because the other products are too
// small to matter. Smaller products come first. Key part 0 overwrites the scores, later parts add to them.
template <int COLUMNS, int PARTS = 1, typename T, int ROWS, int KEYS, int D>
FLASHATTN_FUNC void begin_multiply_keys(Fragment (&scores)[KEYS / 8], SharedTile<T, ROWS, D> queries, int first_row,
                                        SharedTile<T, KEYS, D> keys, int key_part = 0) {
  uint memory = queries.memory + first_row * 128;
  if (PARTS > 1) asm volatile("" : "+r"(memory));  // keeps the compiler from holding all descriptors in registers
  Descriptor b = descriptor(keys.memory, 0);
  FLASHATTN_UNROLL
  for (int part = PARTS - 1 > key_part ? PARTS - 1 - key_part : 0; part < PARTS; ++part) {
    Descriptor a = descriptor(memory + part * queries.kBytes, 0);
    FLASHATTN_UNROLL
    for (int step = 0; step < (COLUMNS + 15) / 16; ++step) {
      int a_step = step / 4 * queries.kPanel + step % 4 * 32, b_step = step / 4 * keys.kPanel + step % 4 * 32;
      bool is_first = key_part == 0 && part == PARTS - 1 && step == 0;
      Product<T, KEYS>::of_rows(scores, a + (a_step >> 4), b + (b_step >> 4), !is_first);
    }
  }
  commit_products();
}

// Starts to add probabilities @ values to the sums, but only for part value_part of the values (of VALUE_PARTS parts).
// If `fresh`, part 0 overwrites the sums.
template <int VALUE_PARTS, int PARTS, typename T, int KEYS, int DV>
FLASHATTN_FUNC void begin_add_values(Fragment (&sums)[DV / 8], const uint (&probabilities)[KEYS / 16][PARTS][4],
                                     SharedTile<T, KEYS, DV> values, int value_part = 0, bool fresh = false) {
  constexpr int kSteps = KEYS / 16, kColumns = 128;  // at most this many columns per instruction
  constexpr int kWhole = DV / kColumns * kColumns, kRest = DV - kWhole;
  Descriptor b = descriptor(values.memory, values.kPanel);
  bool all_parts = VALUE_PARTS == 2 && kSmallProducts<T>;
  int first_part = all_parts ? 0 : VALUE_PARTS - 1 - value_part, count = (PARTS - first_part) * kSteps;
  FLASHATTN_UNROLL
  for (int n = 0; n < count; ++n) {
    int part = VALUE_PARTS > 1 ? first_part + n / kSteps : n % PARTS;
    int i = VALUE_PARTS > 1 ? n % kSteps : n / PARTS;
    bool add = !(fresh && value_part == 0 && n == 0);
    const auto rows = [&](int column) { return b + ((i * 16 * 128 + column / 64 * values.kPanel) >> 4); };
    FLASHATTN_UNROLL
    for (int column = 0; column < kWhole; column += kColumns) {
      Product<T, kColumns>::of_columns(&sums[column / 8], probabilities[i][part], rows(column), add);
    }
    if constexpr (kRest > 0) {
      Product<T, kRest>::of_columns(&sums[kWhole / 8], probabilities[i][part], rows(kWhole), add);
    }
  }
  commit_products();
}

}  // namespace flashattn
