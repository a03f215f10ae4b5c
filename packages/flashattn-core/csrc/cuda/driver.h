// Describes the GPU, its driver and NVRTC. Compiles a kernel when a caller first asks for it, and returns it.
#pragma once

#include "../gpu/launch.h"
#include "libraries.h"

namespace flashattn::cuda {

gpu::Device properties(int device);

// Throws NoKernelError if the device cannot run the kernels, or if NVRTC does not know the device. The message
// says what to do.
void check_device(int device);

// Returns a description such as "sm_90a, driver for CUDA 13.0, NVRTC 13.0".
std::string describe(int device);

// Returns the compiled kernel, and keeps it in memory and on disk. If NVRTC or the driver fails, throws a
// std::runtime_error that names their versions. A later call tries again.
CUfunction function_of(const gpu::Launch& launch, int device);

}  // namespace flashattn::cuda
