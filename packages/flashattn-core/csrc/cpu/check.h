// The contract of the kernels: what they take for granted about a call's numbers and pointers.
#pragma once

#include "backward.h"

namespace flashattn::cpu {

constexpr int kMaxHeadDim = 512;
constexpr int kMaxPositions = 2147483647 - 1024;  // positions are int32, and loops run up to one tile further

// Of quantised keys and values: whether there is a kernel for so many bits, and for groups of this size.
constexpr bool has_bits(int bits) {
  return (1 <= bits && bits <= 6) || bits == 8;
}
constexpr bool has_group_size(int group_size) {
  return group_size == 32 || group_size == 64 || group_size == 128;
}

// Throw std::invalid_argument naming the field, what was expected and what came. What they let through the kernels
// compute without reading or writing outside of the memory that the strides reach, and without a race between threads.
// They read no data and take some hundred nanoseconds. The kernels do not call them: whoever fills the structs does.
void check(const AttentionArgs& args);
void check(const BackwardArgs& args);

}  // namespace flashattn::cpu
