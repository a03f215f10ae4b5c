// What Metal runs for a call: plain data, computed and tested on any machine (tests/metal runs these very launches on
// the CPU). encode.cpp hands them to Metal.
#pragma once

#include "../call/kernel_table.h"
#include "../gpu/instance.h"

namespace flashattn::metal {

gpu::Launches launches(Kernel kernel, const gpu::Call& call);

// The gradients of one call: delta, dq, and dk and dv, each written completely. Without queries, or without keys, what
// would write nothing is left out.
gpu::Launches backward_launches(const gpu::Call& call, const BackwardParams& backward);

// Where a kernel finds an argument. The gradient's numbers are those of a decode step's scratch: Metal has 31.
constexpr int buffer_of(gpu::Binding binding) {
  constexpr int kShared = gpu::index(gpu::Binding::partials), kGradient = gpu::index(gpu::Binding::dout);
  constexpr int kRealign = gpu::index(gpu::Binding::misaligned);
  int number = gpu::index(binding);
  return number >= kRealign ? number - kRealign : number >= kGradient ? number - kGradient + kShared : number;
}
static_assert(buffer_of(gpu::Binding::backward) < 31 && buffer_of(gpu::Binding::split) < 31);

// The text that Metal compiles for a launch: constants and bindings by their names, the kernel's file with everything
// that it includes, and the one instantiation. ASCII.
std::string source_text(const gpu::Launch& launch);
const gpu::Sources& sources();

}  // namespace flashattn::metal
