// Hands a call to MLX's CUDA backend. encode.cpp is compiled on Linux, no_cuda.cpp elsewhere.
#pragma once

#include "../gpu/work.h"
#include "mlx/stream.h"

namespace flashattn::cuda {

namespace mx = mlx::core;

// Puts the launches into the stream's command encoder. Arrays are read and written in place, through their strides.
void encode(const gpu::Work& work, mx::Stream stream);

// Gives the array memory of the GPU, in the order of the stream, as MLX's own ops get it.
void allocate(mx::array& output, mx::Stream stream);

// Frees the scratch that the calling thread's streams keep for their next call, after the calls under way.
void release_scratch();

// The first GPU.
gpu::Device device();

}  // namespace flashattn::cuda
