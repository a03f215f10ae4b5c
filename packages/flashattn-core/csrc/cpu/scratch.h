// A thread's working memory for one block of rows, and the sizes of the tiles that it holds.
#pragma once

#include "kept_memory.h"
#include "kernels.h"
#include "masked_scores.h"
#include "matmul.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Keys per tile: many, because each tile rescales the output; a multiple of kRows, the height of a register tile.
constexpr int kKeyTile = 288;

// Rows of a band, which skips the keys that none of them sees: with fewer rows, fewer hidden keys are computed along a
// causal diagonal. A multiple of the packed panels' width.
constexpr int kBandRows = kWidth == 16 ? 64 : 48;

constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Rows that are computed over a tile together.
struct Band {
  int first, rows, columns;  // columns: with padding
  Span any, all;             // the keys that some row sees, and those that all see

  int lanes() const { return larger(columns, kWidth); }  // scores per step: whole vectors
  int keys() const { return lanes() / columns; }         // keys per step
};

// The working memory of a block. It grows to the largest block that the thread has seen.
struct Scratch {
  KeptMemory memory;

  // The layout for the current block.
  bool few_rows;      // so few that the scores of several keys share a vector, see dot()
  int columns;        // the rows and their padding: whole vectors, or for few rows the next power of two
  int depth;          // columns of query and key: head_dim, padded to whole vectors if dot() reads them
  int value_columns;  // value_dim, padded to whole vectors
  float* query;       // times scale; packed (depth, columns), or for few rows (rows, depth)
  float* key;         // (kKeyTile, depth)
  float* value;       // packed (kKeyTile, value_columns)
  float* key_store;   // for quantised keys: a tile's scales and biases, and copied words
  float* value_store;
  float* scores;  // scores of a band, then its probabilities: (kKeyTile, band's columns)
  float* output;  // (rows, value_columns), unnormalised
  Band bands[(kMaxRows + kBandRows - 1) / kBandRows];
  int band_count;
  // One number per row. If rows are few, the numbers repeat to fill a vector.
  float row_max[kMaxRows];  // -inf: nothing seen yet
  float row_sum[kMaxRows];
  float rescale[kMaxRows];                           // exp(old row_max - new row_max)
  float slope[kMaxRows];                             // ALiBi's
  int32_t position[kMaxRows];                        // of the query among the keys
  int32_t seen_begin[kMaxRows], seen_end[kMaxRows];  // the interval of keys that the row sees
  int32_t next_key[kMaxRows];                        // how many keys the lane's key is after the vector's first key

  // `dots`: whether the scores of few rows are dot products.
  void prepare(int rows, const AttentionParams& params, bool dots) {
    int head_dim = params.head_dim, value_dim = params.value_dim;
    few_rows = dots && rows <= kMaxDotRows;
    columns = few_rows ? power_of_two(rows) : round_up(rows, kWidth);
    depth = few_rows ? round_up(head_dim, kWidth) : head_dim;
    value_columns = round_up(value_dim, kWidth);
    struct Part {
      float** start;
      int64_t size;
    };
    const Part parts[] = {{&query, int64_t{depth} * columns},
                          {&key, int64_t{kKeyTile} * depth},
                          {&value, int64_t{kKeyTile} * value_columns},
                          {&key_store, kKeyTile * store_size(params, head_dim)},
                          {&value_store, kKeyTile * store_size(params, value_dim)},
                          {&scores, int64_t{kKeyTile} * smaller(columns, kBandRows)},
                          {&output, int64_t{rows} * value_columns}};
    constexpr int64_t kLine = 16;  // each part begins on a cache line
    int64_t total = 0;
    for (const Part& part : parts) total += (part.size + kLine - 1) / kLine * kLine;
    float* next = memory.floats(total);
    for (const Part& part : parts) {
      *part.start = next;
      next += (part.size + kLine - 1) / kLine * kLine;
    }
  }

  // The size of key_store or value_store for one quantised row, in numbers of 4 bytes.
  static int64_t store_size(const AttentionParams& p, int dim) {
    return p.bits == 0 ? 0 : 2 * (dim / p.group_size) + dim * p.bits / 32;
  }
};

}  // namespace flashattn::cpu::FLASHATTN_ISA
