// Kernels ready to run: compiled at their first use, for the GPU that is there.
#pragma once

#include "../gpu/launch.h"
#include "libraries.h"

namespace flashattn::cuda {

// Of the device, which must be current. Machine code is kept in memory, and on disk for the next process. What NVRTC
// and the driver refuse is a std::runtime_error that names kernel and versions.
CUfunction function_of(const gpu::Launch& launch, int device);

}  // namespace flashattn::cuda
