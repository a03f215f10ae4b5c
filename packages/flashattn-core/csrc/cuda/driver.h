// The GPU with the software that runs it, and kernels ready to run: compiled when they are first asked for.
#pragma once

#include "../gpu/launch.h"
#include "libraries.h"

namespace flashattn::cuda {

gpu::Device properties(int device);

// Throws NoKernelError, with the cure, where the device cannot run the kernels, or NVRTC does not know it.
void check_device(int device);

// "sm_90a, driver for CUDA 13.0, NVRTC 13.0"
std::string describe(int device);

// Kept, on disk too. What NVRTC or the driver refuse is a std::runtime_error with the versions, once and for all unless
// it is for want of memory.
CUfunction function_of(const gpu::Launch& launch, int device);

}  // namespace flashattn::cuda
