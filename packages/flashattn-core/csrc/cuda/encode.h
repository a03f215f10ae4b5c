// Hands a call to MLX's CUDA backend. encode.cpp is compiled on Linux, and no_cuda.cpp on other systems.
#pragma once

#include "../gpu/work.h"
#include "mlx/stream.h"

namespace flashattn::cuda {

namespace mx = mlx::core;

// Adds a call's launches to the stream's encoder. Kernels read and write arrays in place, through their strides.
void encode(const gpu::Work& work, mx::Stream stream);

// Allocates the array's GPU memory in the order of the stream, as MLX's own ops do.
void allocate(mx::array& output, mx::Stream stream);

// Frees the scratch that the calling thread keeps for later calls. Calls that still run keep their scratch until they
// end.
void release_scratch();

}  // namespace flashattn::cuda
