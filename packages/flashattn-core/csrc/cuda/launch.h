// What CUDA runs for a call: plain data, computed and tested on any machine. encode.cpp hands it to MLX.
#pragma once

#include "../call/kernel_table.h"
#include "../gpu/instance.h"
#include "arguments.h"

namespace flashattn::cuda {

static_assert(gpu::kNumBindings <= kMaxArrays);

gpu::Launches launches(Kernel kernel, const gpu::Call& call);

// The text that NVRTC compiles for a launch: its constants, the kernel's file with everything that it includes, and the
// entry. ASCII.
std::string source_text(const gpu::Launch& launch);
const gpu::Sources& sources();

}  // namespace flashattn::cuda
