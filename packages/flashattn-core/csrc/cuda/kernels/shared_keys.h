// The last blocks of a launch may share the keys of their rows: each computes some of the tiles and leaves a partial
// result.
#pragma once

#include "kernel.h"

namespace flashattn {

// A block's rows, numbered as if no block shared its keys, and its share of their tiles: `chunk` of `chunks`.
struct BlockShare {
  uint rows;
  int chunk;
  int chunks;
};
FLASHATTN_FUNC BlockShare share_of_block(const SplitParams& split) {
  int later = int(blockIdx.x) - split.whole_blocks;
  if (split.num_chunks <= 1 || later < 0) return BlockShare{blockIdx.x, 0, 1};
  return BlockShare{uint(split.whole_blocks + later / split.num_chunks), later % split.num_chunks, split.num_chunks};
}

// The partial results of blocks that share keys, ROWS rows each. A row: DV columns, not yet divided by their sum, then
// its maximum and its sum.
template <int ROWS, int DV>
struct BlockPartials {
  static constexpr int kPitch = DV + cuda::kPartialPadding;  // whole float4

  float* memory;

  // block: its number among the blocks that share keys.
  FLASHATTN_FUNC float* row(int block, int row) const { return memory + (int64_t(block) * ROWS + row) * kPitch; }
};

}  // namespace flashattn
