// The contract of the CPU kernels: what they assume about the numbers and pointers of a call.
#pragma once

#include "backward.h"

namespace flashattn::cpu {

// Throws std::invalid_argument that names the field, the expected and the found value. An accepted call accesses only
// memory that its strides reach, and its threads do not race. check() does not read the arrays. The drivers and the
// fuzzer use it. The op has its own checks, with messages for users.
void check(const AttentionArgs& args);
void check(const BackwardArgs& args);

}  // namespace flashattn::cpu
