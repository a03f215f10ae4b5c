// Hands a call to MLX's CUDA backend. encode.cpp is compiled on Linux, no_cuda.cpp elsewhere.
#pragma once

#include "../gpu/work.h"
#include "mlx/stream.h"

namespace flashattn::cuda {

namespace mx = mlx::core;

// Adds the launches to the stream's command encoder. Arrays are read and written in place, through their strides.
void encode(const gpu::Work& work, mx::Stream stream);

// Gives the array GPU memory, in the order of the stream, as MLX's own ops do.
void allocate(mx::array& output, mx::Stream stream);

// Frees the scratch that the calling thread keeps for its streams' next calls, once the calls under way are done.
void release_scratch();

// The properties of the first GPU.
gpu::Device device();

}  // namespace flashattn::cuda
