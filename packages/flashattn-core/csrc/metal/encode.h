// Hands a call to MLX's Metal backend. encode.cpp is compiled where MLX has Metal, no_metal.cpp elsewhere.
#pragma once

#include "../gpu/work.h"
#include "mlx/stream.h"

namespace flashattn::metal {

namespace mx = mlx::core;

// Adds a call's launches to the stream's encoder. Kernels read and write arrays in place, through their strides.
void encode(const gpu::Work& work, mx::Stream stream);

}  // namespace flashattn::metal
