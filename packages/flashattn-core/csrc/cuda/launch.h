// What CUDA runs for a call: plain data, computed and tested on any machine. encode.cpp hands it to MLX.
#pragma once

#include "../call/kernel_table.h"
#include "../gpu/launch.h"
#include "arguments.h"

namespace flashattn::cuda {

static_assert(gpu::kNumBindings <= kMaxArrays);

gpu::Launches launches(Kernel kernel, const gpu::Call& call);

// Copies an array of elements of so many bytes, which may begin anywhere.
gpu::Launches realign_launches(const RealignParams& params, int itemsize);

// The text that NVRTC compiles for a launch: its constants, the kernel's file with everything that it includes, and the
// entry. ASCII.
std::string source_text(const gpu::Launch& launch);

}  // namespace flashattn::cuda
