// NVRTC and NVIDIA's driver, as libmlx has loaded them: this module links to neither. Where one of them, or a function
// of theirs, is missing, everything here throws NoKernelError with the cure; what they refuse is a std::runtime_error.
#pragma once

#include <cstdint>
#include <string>

#include "../gpu/launch.h"
#include "arguments.h"

struct CUfunc_st;
using CUfunction = CUfunc_st*;

namespace flashattn::cuda {

// Throws NoKernelError, with the cure, where the device cannot run the kernels, or NVRTC does not know it.
void check_device(int device);

gpu::Device properties(int device);
std::string architecture(int device);  // "sm_90a"
std::string nvrtc_version();           // "13.0"
std::string driver_version();          // "13.0": the newest CUDA that the driver knows

// An array of 16-bit floats, its dimensions and their steps in bytes from the fastest on, and a box of it: 64 columns
// of `rows` rows, which come as SharedTile has them. The first dimension's elements lie side by side.
struct BoxOfArray {
  bool bfloat;
  const void* address;
  uint64_t sizes[4];
  uint64_t steps[3];  // of all dimensions but the first: multiples of 16
  int rows;
};
TensorMap tensor_map(const BoxOfArray& box);

// Machine code of a text. The error has the compiler's log.
std::string compiled(const std::string& text, const std::string& name, const std::string& architecture);

// The kernel of this name in machine code, loaded for ever. dynamic_shared: bytes that its launches may have. The
// device must be current.
CUfunction loaded(const std::string& cubin, const std::string& name, int dynamic_shared, int device);

}  // namespace flashattn::cuda
