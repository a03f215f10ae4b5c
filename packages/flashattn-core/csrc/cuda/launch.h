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

// New rows for the six arrays of a quantised cache.
struct NewRows {
  Dtype dtype;                   // of the rows, and of scales and biases
  AttentionParams params;        // key and value have the strides of the new rows, and key_len is the cache's capacity
  SplitParams split;             // chunk_len new rows, the first of which becomes row first_key
  std::array<bool, 6> in_place;  // which of the six arrays the launch overwrites; it writes all rows of the others
};
gpu::Launches append_launches(const NewRows& rows);

// The ASCII text that NVRTC compiles for a launch: first the constants, then the kernel's file with its includes, then
// the entry point.
std::string source_text(const gpu::Launch& launch);
const gpu::Sources& sources();

}  // namespace flashattn::cuda
