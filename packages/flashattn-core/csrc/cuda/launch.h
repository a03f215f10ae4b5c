// Computes CUDA's launches for a call. They are plain data, so that any machine can compute and test them. encode.cpp
// hands them to MLX.
#pragma once

#include "../call/choose.h"
#include "../gpu/instance.h"
#include "arguments.h"

namespace flashattn::cuda {

static_assert(gpu::kNumBindings <= kMaxArrays);

gpu::Launches launches(Kernel kernel, const gpu::GpuCall& call);
gpu::Launches backward_launches(const gpu::GpuCall& call, const BackwardParams& backward);

// The ASCII text that NVRTC compiles for a launch: first the constants, then the kernel's file with its includes, then
// the entry point.
std::string source_text(const gpu::Launch& launch);
const gpu::Sources& sources();

}  // namespace flashattn::cuda
