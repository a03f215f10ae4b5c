// The GPU with its driver and NVRTC, and kernels ready to run, which are compiled when they are first asked for.
#pragma once

#include "../gpu/launch.h"
#include "libraries.h"

namespace flashattn::cuda {

gpu::Device properties(int device);

// Throws NoKernelError, which says what to do, if the device cannot run the kernels or NVRTC does not know it.
void check_device(int device);

// "sm_90a, driver for CUDA 13.0, NVRTC 13.0"
std::string describe(int device);

// The compiled kernel, kept in memory and on disk. If NVRTC or the driver fails, throws a std::runtime_error with the
// versions. Further calls throw it again, unless memory was short.
CUfunction function_of(const gpu::Launch& launch, int device);

}  // namespace flashattn::cuda
