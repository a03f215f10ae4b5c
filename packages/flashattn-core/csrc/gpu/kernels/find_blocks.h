// Functions that compute the block map of a mask, see call/block_map.h.
#pragma once

#include "call/block_map.h"
#include "elements.h"
#include "offsets.h"

namespace flashattn {

// One block of a mask: the offset of its first entry, and how many rows and keys it has.
struct MaskBlock {
  int64_t offset;
  int rows, keys;
};

// Returns the block with the number `block` in row-major order. params: the mask's shape and strides.
FLASHATTN_FUNC MaskBlock mask_block(FLASHATTN_UNIFORM ArrayParams& params, int64_t block) {
  int rows = params.shape[params.ndim - 2], keys = params.shape[params.ndim - 1];
  int row_blocks = (rows + kBlockSize - 1) / kBlockSize, key_blocks = (keys + kBlockSize - 1) / kBlockSize;
  int64_t rest = block / key_blocks;
  int first_key = int(block % key_blocks) * kBlockSize, first_row = int(rest % row_blocks) * kBlockSize;
  rest /= row_blocks;
  int64_t offset = first_key * params.strides[params.ndim - 1] + first_row * params.strides[params.ndim - 2];
  for (int d = params.ndim - 3; d >= 0; --d) {
    offset += rest % params.shape[d] * params.strides[d];
    rest /= params.shape[d];
  }
  return MaskBlock{offset, minimum(rows - first_row, int(kBlockSize)), minimum(keys - first_key, int(kBlockSize))};
}

// Collects the flags kBlockShows and kBlockChanges of a mask's entries.
struct Entries {
  bool shows;
  bool changes;

  FLASHATTN_FUNC void add_visible(bool visible) FLASHATTN_THREAD {
    shows = shows || visible;
    changes = changes || !visible;
  }
  FLASHATTN_FUNC void add_bias(float bias) FLASHATTN_THREAD {
    shows = shows || bias != -INFINITY;
    changes = changes || bias != 0;
  }
};

// Reads the column of one key in a block. DTYPE: the number of the mask's dtype in call/dtype.h, or -1 for bool.
template <int DTYPE>
FLASHATTN_FUNC Entries entries_of_key(FLASHATTN_UNIFORM ArrayParams& params, const FLASHATTN_DEVICE uchar* mask,
                                      MaskBlock block, int key) {
  Entries entries = {false, false};
  FLASHATTN_UNROLL
  for (int r = 0; r < kBlockSize; ++r) {
    if (key < block.keys && r < block.rows) {
      int64_t at = block.offset + key * params.strides[params.ndim - 1] + r * params.strides[params.ndim - 2];
      if (DTYPE < 0) {
        entries.add_visible(mask[at] != 0);
      } else {
        entries.add_bias(load_float(mask, DTYPE, at));
      }
    }
  }
  return entries;
}

// Writes the byte of a block: the "or" of the flags that the lanes of a SIMD group found.
FLASHATTN_FUNC void store_block(Entries entries, FLASHATTN_DEVICE uchar* block, uint lane) {
  int any_shows = int(FLASHATTN_LANE_MAX(entries.shows ? 1.0f : 0.0f));
  int any_changes = int(FLASHATTN_LANE_MAX(entries.changes ? 1.0f : 0.0f));
  if (lane == 0) {
    *block = uchar(any_shows * kBlockShows + any_changes * kBlockChanges);
  }
}

}  // namespace flashattn
