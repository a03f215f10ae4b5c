// See find_blocks.h: a warp has a block.
#include "find_blocks.h"
#include "kernel.h"

using namespace flashattn;

template <int DTYPE>
FLASHATTN_KERNEL block_map(const cuda::Arguments& arguments) {
  FLASHATTN_VALUE(ArrayParams, array_params);
  FLASHATTN_READ(uchar, mask);
  FLASHATTN_WRITTEN(uchar, found_blocks);
  find_block<DTYPE>(array_params, mask, found_blocks, int64_t(blockIdx.x) * 8 + warp_index(), lane_index());
}
