// Splits a mask into runs of blocks and spreads them over the threads.
#include "block_map.h"

#include <algorithm>

#include "kernels.h"
#include "threads.h"

namespace flashattn::cpu {

void find_block_map(const void* mask, MaskType type, const ArrayParams& shape, uint8_t* map) {
  constexpr int64_t kBlocksOfRun = 512;
  int leading = shape.ndim - 2;
  int64_t rows = shape.shape[leading], keys = shape.shape[leading + 1], matrices = 1;
  int64_t row_stride = shape.strides[leading], key_stride = shape.strides[leading + 1];
  for (int d = 0; d < leading; ++d) matrices *= shape.shape[d];
  int64_t row_blocks = (rows + kBlockSize - 1) / kBlockSize, key_blocks = (keys + kBlockSize - 1) / kBlockSize;
  int64_t runs = (key_blocks + kBlocksOfRun - 1) / kBlocksOfRun;
  const Kernels& isa = kernels();
  parallel_for(matrices * row_blocks * runs, [&](int64_t i) {
    int64_t first_key = i % runs * kBlocksOfRun * kBlockSize, first_row = i / runs % row_blocks * kBlockSize;
    int64_t offset = first_row * row_stride + first_key * key_stride, rest = i / runs / row_blocks;
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
                     .keys = static_cast<int>(std::min(kBlocksOfRun * kBlockSize, keys - first_key)),
                     .blocks = map + i / runs * key_blocks + i % runs * kBlocksOfRun});
  });
}

}  // namespace flashattn::cpu
