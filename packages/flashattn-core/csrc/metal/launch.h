// Computes Metal's launches for a call. They are plain data, so that any machine can compute and test them: tests/metal
// runs them on the CPU. encode.cpp hands them to Metal.
#pragma once

#include "../call/choose.h"
#include "../gpu/instance.h"

namespace flashattn::metal {

gpu::Launches launches(Kernel kernel, const gpu::GpuCall& call);

// The launches that compute a call's gradients: first delta, then dq, then dk and dv. Together they write every element
// of these four arrays. If there are no queries or no keys, a launch that has nothing to write is left out.
gpu::Launches backward_launches(const gpu::GpuCall& call, const BackwardParams& backward);

// The buffer index of an argument. Metal has only 31 indices, so arguments of different kernels share some. The
// gradient's own arguments begin at the index of `partials`. The arguments of the block_map kernel begin at 0.
// exact_out has the last index.
constexpr int buffer_of(gpu::Binding binding) {
  if (binding == gpu::Binding::exact_out) return 30;
  constexpr int kShared = gpu::index(gpu::Binding::partials), kGradient = gpu::index(gpu::Binding::dout);
  constexpr int kBlockMap = gpu::index(gpu::Binding::array_params);
  int number = gpu::index(binding);
  return number >= kBlockMap ? number - kBlockMap : number >= kGradient ? number - kGradient + kShared : number;
}
static_assert(buffer_of(gpu::Binding::backward) < 30 && buffer_of(gpu::Binding::split) < 30);

// The ASCII text that Metal compiles for a launch: first the constants and buffer indices, then the kernel's file with
// its includes, then one instantiation.
std::string source_text(const gpu::Launch& launch);
const gpu::Sources& sources();

}  // namespace flashattn::metal
