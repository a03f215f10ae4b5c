// Finds the block map of a mask, see call/block_map.h.
#pragma once

#include <cstdint>

#include "../call/block_map.h"
#include "../call/params.h"

namespace flashattn::cpu {

enum class MaskType { boolean, float32, float16, bfloat16 };

// Writes the map of a mask with at least two axes, rows and keys, to `map`: one byte for each block, row-major.
void find_block_map(const void* mask, MaskType type, const ArrayParams& shape, uint8_t* map);

}  // namespace flashattn::cpu
