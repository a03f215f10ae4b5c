// The contract of the kernels: what they take for granted about a call's numbers and pointers.
#pragma once

#include "backward.h"

namespace flashattn::cpu {

// Throw std::invalid_argument naming the field, what was expected and what came. What they let through the kernels
// compute without reading or writing outside of the memory that the strides reach, and without a race between threads.
// They read no data. The drivers and the fuzzer call them; the op checks what a caller can get wrong in its own words.
void check(const AttentionArgs& args);
void check(const BackwardArgs& args);

}  // namespace flashattn::cpu
