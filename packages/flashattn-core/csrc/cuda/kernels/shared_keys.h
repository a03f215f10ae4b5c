// The last blocks of a launch may share the keys of their rows: each has some of the tiles, and leaves a partial
// result.
#pragma once

#include "kernel.h"

namespace flashattn {

// Which rows a block has, numbered as if none were shared, and which of how many chunks of their tiles.
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

// The partial results of blocks that share keys, ROWS rows of each: DV columns that are not divided by their sum, the
// maximum and the sum.
template <int ROWS, int DV>
struct BlockPartials {
  static constexpr int kPitch = DV + cuda::kPartialPadding;  // whole float4

  float* memory;

  // block: counted from the first that shares its keys.
  FLASHATTN_FUNC float* row(int block, int row) const { return memory + (int64_t(block) * ROWS + row) * kPitch; }
};

}  // namespace flashattn
