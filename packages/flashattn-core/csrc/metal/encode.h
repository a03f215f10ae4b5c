// Hands a call to MLX's Metal backend. encode.cpp is compiled where MLX has Metal, no_metal.cpp elsewhere.
#pragma once

#include "../gpu/work.h"
#include "mlx/stream.h"

namespace flashattn::metal {

namespace mx = mlx::core;

// Adds the launches to the stream's command encoder. Arrays are read and written in place, through their strides.
void encode(const gpu::Work& work, mx::Stream stream);

}  // namespace flashattn::metal
