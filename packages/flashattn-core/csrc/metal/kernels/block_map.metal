// Computes a block map, see find_blocks.h. Each SIMD group reads one block, and each lane reads the column of one key.
#include "arguments.h"
#include "find_blocks.h"

using namespace flashattn;

// Each SIMD group has one block of the mask. Grid: divide_up(array_params.count, 8) threadgroups of 8 SIMD groups.
template <int DTYPE>
FLASHATTN_KERNEL(8)
block_map(FLASHATTN_VALUE(ArrayParams, array_params), FLASHATTN_READ(uchar, mask),
          FLASHATTN_WRITTEN(uchar, found_blocks), FLASHATTN_POSITION) {
  int64_t index = int64_t(group.x) * 8 + simdgroup;
  if (index < array_params.count) {
    MaskBlock block = mask_block(array_params, index);
    store_block(entries_of_key<DTYPE>(array_params, mask, block, int(lane)), found_blocks + index, lane);
  }
}
