// Computes block maps (see call/block_map.h) as lazy arrays. Layers of one evaluation that share a mask share its map.
#pragma once

#include <optional>

#include "../request/arguments.h"

namespace flashattn {

// Returns the block map of a call's array masks, or nothing if the call has none. `inputs` are primitive_inputs() of
// `arguments`.
std::optional<mx::array> block_map_of(const Arguments& arguments, const Inputs& inputs, const mx::Stream& stream);

// Adds the block map to a primitive's inputs, if the call has an array mask and has_block_map() is true.
void add_block_map(const Arguments& arguments, Arrays& inputs, Present& present, Backend backend,
                   const mx::Stream& stream);

// Lets the calls of one evaluation share this mask's block maps. Call forget_block_maps() once for each call of this
// function. The last call of forget_block_maps() frees the maps.
std::uintptr_t keep_block_maps(const mx::array& mask);
void forget_block_maps(std::uintptr_t mask_id);

}  // namespace flashattn
