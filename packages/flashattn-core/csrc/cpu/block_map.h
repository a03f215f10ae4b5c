// Finds the block map of a mask, see call/block_map.h.
#pragma once

#include <cstdint>

#include "../call/block_map.h"
#include "../call/params.h"

namespace flashattn::cpu {

enum class MaskType { boolean, float32, float16, bfloat16 };

// Writes the block map of a mask to `map`, row-major. The mask's last two axes are queries and keys.
void find_block_map(const void* mask, MaskType type, const ArrayParams& shape, uint8_t* map);

}  // namespace flashattn::cpu
