// Sums of dq in float32. Blocks of keys add to them one after the other, always in the same order.
#pragma once

#include "gradient_block.h"

namespace flashattn {

// QUERIES: the queries of a tile. Every 64 queries and 64 columns have a piece, which holds the fragments of a
// warpgroup's threads. D: head_dim, rounded up.
template <int QUERIES, int D>
struct DqSums {
  static constexpr int kColumns = (D + 63) / 64 * 64, kPieceBytes = 64 * 64 * sizeof(float);

  float* sums;
  uint* turns;  // how many blocks have started, then how many have added to each tile; all are 0 between calls

  struct Tile {
    float* sums;
    uint* turn;  // see wait_for_turn()
  };
  // query: the tile's first query.
  FLASHATTN_FUNC Tile tile(const AttentionParams& params, int batch, int head, int query) const {
    int tiles = (params.query_len + QUERIES - 1) / QUERIES;
    int64_t tile = (int64_t(batch) * params.num_heads + head) * tiles + query / QUERIES;
    return {sums + tile * QUERIES * kColumns, turns + 1 + tile};
  }
};

}  // namespace flashattn
