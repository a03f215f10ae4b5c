// Several blocks of a launch may compute the same rows and share their keys. Each of these blocks then computes some
// tiles of keys and writes a partial result. prefill_merge.cu merges the partial results.
#pragma once

#include "kernel.h"

namespace flashattn {

struct BlockShare {
  uint rows;  // index of the block's rows; blocks that share keys compute the same rows
  int chunk;  // which part of the tiles the block computes: number `chunk` of `chunks` parts
  int chunks;
};
FLASHATTN_FUNC BlockShare share_of_block(const SplitParams& split) {
  int later = int(blockIdx.x) - split.whole_blocks;
  if (split.num_chunks <= 1 || later < 0) return BlockShare{blockIdx.x, 0, 1};
  return BlockShare{uint(split.whole_blocks + later / split.num_chunks), later % split.num_chunks, split.num_chunks};
}

// The partial results of blocks that share keys. A result has ROWS rows. A row has DV columns of the output, then its
// maximum, then its sum. The output is not yet divided by the sum.
template <int ROWS, int DV>
struct BlockPartials {
  static constexpr int kPitch = DV + cuda::kPartialPadding;  // a multiple of four floats

  float* memory;

  // block: the block's number among the blocks that share keys.
  FLASHATTN_FUNC float* row(int block, int row) const { return memory + (int64_t(block) * ROWS + row) * kPitch; }
};

}  // namespace flashattn
