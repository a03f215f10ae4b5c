// Finds a block of a mask's block map, see call/block_map.h: by a SIMD group, a lane a key.
#pragma once

#include "call/block_map.h"
#include "elements.h"
#include "offsets.h"

namespace flashattn {

// DTYPE: of the mask, by its number in dtype.h; -1: bool. params: of the mask. blocks: row-major.
template <int DTYPE>
FLASHATTN_FUNC void find_block(FLASHATTN_UNIFORM ArrayParams& params, const FLASHATTN_DEVICE uchar* mask,
                               FLASHATTN_DEVICE uchar* blocks, int64_t block, uint lane) {
  if (block >= params.count) {
    return;
  }
  int rows = params.shape[params.ndim - 2], keys = params.shape[params.ndim - 1];
  int row_blocks = (rows + kBlockSize - 1) / kBlockSize, key_blocks = (keys + kBlockSize - 1) / kBlockSize;
  int64_t rest = block / key_blocks;
  int key = int(block % key_blocks) * kBlockSize + int(lane), first_row = int(rest % row_blocks) * kBlockSize;
  rest /= row_blocks;
  int64_t offset = key * params.strides[params.ndim - 1] + first_row * params.strides[params.ndim - 2];
  for (int d = params.ndim - 3; d >= 0; --d) {
    offset += rest % params.shape[d] * params.strides[d];
    rest /= params.shape[d];
  }
  bool shows = false, changes = false;
  FLASHATTN_UNROLL
  for (int r = 0; r < kBlockSize; ++r) {
    if (key < keys && first_row + r < rows) {
      int64_t at = offset + r * params.strides[params.ndim - 2];
      if (DTYPE < 0) {
        bool visible = mask[at] != 0;
        shows = shows || visible;
        changes = changes || !visible;
      } else {
        float bias = load_float(mask, DTYPE, at);
        shows = shows || bias != -INFINITY;
        changes = changes || bias != 0;
      }
    }
  }
  int any_shows = int(FLASHATTN_LANE_MAX(shows ? 1.0f : 0.0f));
  int any_changes = int(FLASHATTN_LANE_MAX(changes ? 1.0f : 0.0f));
  if (lane == 0) {
    blocks[block] = uchar(any_shows * kBlockShows + any_changes * kBlockChanges);
  }
}

}  // namespace flashattn
