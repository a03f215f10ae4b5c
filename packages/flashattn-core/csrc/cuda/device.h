// The GPU, and the software that runs it.
#pragma once

#include <string>

#include "../gpu/launch.h"

namespace flashattn::cuda {

// Throws NoKernelError, with the cure, where the device cannot run the kernels, or NVRTC does not know it.
void check_device(int device);

gpu::Device properties(int device);
std::string architecture(int device);  // "sm_90a"
std::string nvrtc_version();           // "13.0"
std::string driver_version();          // "13.0": the newest CUDA that the driver knows

}  // namespace flashattn::cuda
