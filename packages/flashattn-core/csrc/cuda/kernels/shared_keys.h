// Several blocks of a launch may share the keys of the same rows. Each then computes some of the tiles and writes a
// partial result, which prefill_merge.cu merges.
#pragma once

#include "kernel.h"

namespace flashattn {

// A block's share of the work.
struct BlockShare {
  uint rows;  // the number that a block with its rows would have if no blocks shared keys
  int chunk;  // the block's part of the tiles: number `chunk` of `chunks`
  int chunks;
};
FLASHATTN_FUNC BlockShare share_of_block(const SplitParams& split) {
  int later = int(blockIdx.x) - split.whole_blocks;
  if (split.num_chunks <= 1 || later < 0) return BlockShare{blockIdx.x, 0, 1};
  return BlockShare{uint(split.whole_blocks + later / split.num_chunks), later % split.num_chunks, split.num_chunks};
}

// The partial results of blocks that share keys, with ROWS rows each. A row consists of DV columns, not yet divided by
// the row's sum, its maximum and its sum.
template <int ROWS, int DV>
struct BlockPartials {
  static constexpr int kPitch = DV + cuda::kPartialPadding;  // a multiple of four floats

  float* memory;

  // block: a number that counts only blocks that share keys.
  FLASHATTN_FUNC float* row(int block, int row) const { return memory + (int64_t(block) * ROWS + row) * kPitch; }
};

}  // namespace flashattn
