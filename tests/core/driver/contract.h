// The contract of the kernels: what they take for granted about a call's numbers and pointers.
#pragma once

#include "backward.h"

namespace flashattn::cpu {

// check() throws std::invalid_argument that names the field, the expected and the found value. Accepted calls access no
// memory outside of what their strides reach and have no race between threads. check() does not read the arrays. The
// drivers and the fuzzer use it; the op has its own checks, with messages for users.
void check(const AttentionArgs& args);
void check(const BackwardArgs& args);

}  // namespace flashattn::cpu
