// What CUDA runs for a call: plain data, computed and tested on any machine. encode.cpp hands it to MLX.
#pragma once

#include "../call/kernel_table.h"
#include "../gpu/instance.h"
#include "arguments.h"

namespace flashattn::cuda {

static_assert(gpu::kNumBindings <= kMaxArrays);

gpu::Launches launches(Kernel kernel, const gpu::Call& call);
gpu::Launches backward_launches(const gpu::Call& call, const BackwardParams& backward);

// What NVRTC compiles for a launch, in ASCII: constants, the kernel's file with all that it includes, and the entry.
std::string source_text(const gpu::Launch& launch);
const gpu::Sources& sources();

}  // namespace flashattn::cuda
