// CUDA's launches for a call, as plain data that any machine can compute and test. encode.cpp hands them to MLX.
#pragma once

#include "../call/kernel_table.h"
#include "../gpu/instance.h"
#include "arguments.h"

namespace flashattn::cuda {

static_assert(gpu::kNumBindings <= kMaxArrays);

gpu::Launches launches(Kernel kernel, const gpu::Call& call);
gpu::Launches backward_launches(const gpu::Call& call, const BackwardParams& backward);

// The text that NVRTC compiles for a launch, in ASCII: constants, the kernel's file with its includes, the entry point.
std::string source_text(const gpu::Launch& launch);
const gpu::Sources& sources();

}  // namespace flashattn::cuda
