// Spreads the blocks of a mask over the threads, up to kChunkBlocks neighbouring blocks at a time.
#include "block_map.h"

#include <algorithm>

#include "kernels.h"
#include "threads.h"

namespace flashattn::cpu {

void find_block_map(const void* mask, MaskType type, const ArrayParams& shape, uint8_t* map) {
  constexpr int64_t kChunkBlocks = 512;
  int leading = shape.ndim - 2;
  int64_t rows = shape.shape[leading], keys = shape.shape[leading + 1], matrices = 1;
  int64_t row_stride = shape.strides[leading], key_stride = shape.strides[leading + 1];
  for (int d = 0; d < leading; ++d) matrices *= shape.shape[d];
  int64_t row_blocks = (rows + kBlockSize - 1) / kBlockSize, key_blocks = (keys + kBlockSize - 1) / kBlockSize;
  int64_t chunks = (key_blocks + kChunkBlocks - 1) / kChunkBlocks;
  const Kernels& isa = kernels();
  parallel_for(matrices * row_blocks * chunks, [&](int64_t i) {
    int64_t first_key = i % chunks * kChunkBlocks * kBlockSize, first_row = i / chunks % row_blocks * kBlockSize;
    int64_t offset = first_row * row_stride + first_key * key_stride, rest = i / chunks / row_blocks;
    for (int d = leading - 1; d >= 0; --d) {
      offset += rest % shape.shape[d] * shape.strides[d];
      rest /= shape.shape[d];
    }
    isa.find_blocks({.mask = mask,
                     .type = type,
                     .offset = offset,
                     .row_stride = row_stride,
                     .key_stride = key_stride,
                     .rows = static_cast<int>(std::min<int64_t>(kBlockSize, rows - first_row)),
                     .keys = static_cast<int>(std::min(kChunkBlocks * kBlockSize, keys - first_key)),
                     .blocks = map + i / chunks * key_blocks + i % chunks * kChunkBlocks});
  });
}

}  // namespace flashattn::cpu
