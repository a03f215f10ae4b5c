// Computes a block map, see find_blocks.h. Each warp computes one block, and each lane reads one row of the block in
// 16-byte loads. A lane reads the column of one key instead if the mask's key stride is not 1, its rows do not begin at
// multiples of 16 bytes, or the block has fewer than kBlockSize keys.
#include "find_blocks.h"
#include "kernel.h"

using namespace flashattn;

// The flags of one row of the block. The row has kBlockSize entries and begins at a multiple of 16 bytes.
template <int DTYPE>
FLASHATTN_FUNC Entries entries_of_row(const uchar* row) {
  constexpr int kElement = DTYPE < 0 ? 1 : DTYPE == 0 ? 4 : 2, kWords = kBlockSize * kElement / 4;
  uint words[kWords];
  FLASHATTN_UNROLL
  for (int i = 0; i < kWords; i += 4) {
    uint4 four = *reinterpret_cast<const uint4*>(row + i * 4);
    words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
  }
  Entries entries = {false, false};
  FLASHATTN_UNROLL
  for (int i = 0; i < kWords; ++i) {
    if (DTYPE < 0) {
      entries.shows |= words[i] != 0;
      entries.changes |= ((words[i] - 0x01010101) & ~words[i] & 0x80808080) != 0;  // some byte is 0
    } else if (DTYPE == 0) {
      entries.add_bias(__uint_as_float(words[i]));
    } else {
      FLASHATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        ushort bits = ushort(words[i] >> e * 16), infinity = DTYPE == 1 ? 0xfc00 : 0xff80;
        entries.shows |= bits != infinity;
        entries.changes |= (bits & 0x7fff) != 0;
      }
    }
  }
  return entries;
}

template <int DTYPE>
FLASHATTN_KERNEL block_map(const cuda::Arguments& arguments) {
  FLASHATTN_VALUE(ArrayParams, array_params);
  FLASHATTN_READ(uchar, mask);
  FLASHATTN_WRITTEN(uchar, found_blocks);
  constexpr int kElement = DTYPE < 0 ? 1 : DTYPE == 0 ? 4 : 2;
  int lane = lane_index();
  int64_t index = int64_t(blockIdx.x) * 8 + warp_index();
  if (index >= array_params.count) return;
  MaskBlock block = mask_block(array_params, index);
  int64_t step = array_params.strides[array_params.ndim - 2] * kElement;
  const uchar* first = mask + block.offset * kElement;
  bool is_whole = array_params.strides[array_params.ndim - 1] == 1 && block.keys == kBlockSize &&
                  (reinterpret_cast<unsigned long long>(first) | (unsigned long long)(step)) % sizeof(uint4) == 0;
  Entries entries = {false, false};
  if (!is_whole) {
    entries = entries_of_key<DTYPE>(array_params, mask, block, lane);
  } else if (lane < block.rows) {
    entries = entries_of_row<DTYPE>(first + lane * step);
  }
  store_block(entries, found_blocks + index, lane);
}
