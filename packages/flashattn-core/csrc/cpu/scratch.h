// A thread's working memory for one block of rows, and the sizes of the tiles that it holds.
#pragma once

#include "kept_memory.h"
#include "kernels.h"
#include "masked_scores.h"
#include "matmul.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Keys per tile, a multiple of kTileRows. There are many, because the output is rescaled once per tile. With AVX2, a
// panel of values and a strip of probabilities fill three quarters of a first-level cache of 32 KiB.
constexpr int kKeyTile = kWidth == 8 ? 192 : 288;

// Rows of a band. A band skips the keys that none of its rows sees. So small bands compute fewer hidden keys along a
// causal diagonal. The number is a multiple of the width of packed panels.
constexpr int kBandRows = kWidth == 16 ? 64 : kWidth == 8 ? 80 : 48;

constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Rows that are computed over a tile together.
struct Band {
  int first, rows, padded_rows;  // see Scratch
  Span any, all;                 // any: from the first to the last key that a row sees; all: keys that all rows see

  int lanes() const { return larger(padded_rows, kWidth); }  // scores per step of a loop, a multiple of kWidth
  int keys() const { return lanes() / padded_rows; }         // keys per step
};

// A thread's `kept`. Hides from the compiler that its address belongs to the thread: in a shared library GCC would ask
// for the address in inner loops, by a call around which it stores all vectors.
template <typename T>
FLASHATTN_INLINE T& of_thread(T& kept) {
  T* address = &kept;
  asm("" : "+r"(address));
  return *address;
}

// The working memory of a block. It grows to the largest block that the thread has seen.
struct Scratch {
  KeptMemory memory;

  // The layout for the current block.
  bool few_rows;      // so few that the scores of several keys share a vector, see dot()
  int padded_rows;    // rows, rounded up to whole vectors, or with few_rows to a power of two
  int depth;          // columns of query and key: head_dim, padded to whole vectors if dot() reads them
  int value_columns;  // value_dim, padded to whole vectors
  float* query;       // the queries times scale: packed (depth, padded_rows), or with few_rows (rows, depth)
  float* key;         // (kKeyTile, depth)
  float* value;       // packed (kKeyTile, value_columns)
  float* key_store;   // only for quantised keys: a tile's scales and biases, and words if they are copied
  float* value_store;
  float* scores;  // scores of a band, then its probabilities: (kKeyTile, padded rows of the band)
  float* output;  // (rows, value_columns), unnormalised
  Band bands[(kMaxRows + kBandRows - 1) / kBandRows];
  int band_count;
  // These arrays have one number per row. With few_rows, the numbers are repeated to fill a vector.
  float row_max[kMaxRows];  // -inf if the row has seen no key yet
  float row_sum[kMaxRows];
  float rescale[kMaxRows];                           // exp(old row_max - new row_max)
  float slope[kMaxRows];                             // for ALiBi
  int32_t position[kMaxRows];                        // of query i among the keys: i + S - L
  int32_t seen_begin[kMaxRows], seen_end[kMaxRows];  // the interval of keys that the row sees
  int32_t next_key[kMaxRows];                        // the lane's key minus the vector's first key; 0 without few_rows

  // dots: whether dot() computes the scores if there are few rows.
  void prepare(int rows, const AttentionParams& params, bool dots) {
    int head_dim = params.head_dim, value_dim = params.value_dim;
    few_rows = dots && rows <= kMaxDotRows;
    padded_rows = few_rows ? power_of_two(rows) : round_up(rows, kWidth);
    depth = few_rows ? round_up(head_dim, kWidth) : head_dim;
    value_columns = round_up(value_dim, kWidth);
    memory.lay_out({{&query, int64_t{depth} * padded_rows},
                    {&key, int64_t{kKeyTile} * depth},
                    {&value, int64_t{kKeyTile} * value_columns},
                    {&key_store, kKeyTile * store_size(params, head_dim)},
                    {&value_store, kKeyTile * store_size(params, value_dim)},
                    {&scores, int64_t{kKeyTile} * smaller(padded_rows, kBandRows)},
                    {&output, int64_t{rows} * value_columns}});
  }

  // The size of key_store or value_store for one quantised row of `dim` elements, in units of 4 bytes.
  static int64_t store_size(const AttentionParams& p, int dim) {
    return p.bits == 0 ? 0 : 2 * (dim / p.group_size) + dim * p.bits / 32;
  }
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
