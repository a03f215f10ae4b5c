// The contract of the CPU kernels: what they assume about the numbers and pointers of a call.
#pragma once

#include "backward.h"

namespace flashattn::cpu {

// Throws std::invalid_argument if a call breaks the contract. The message names the field, its value and the expected
// values. A call that check() accepts accesses only memory that its strides reach, and its threads do not race.
// check() does not read the arrays. The drivers and the fuzzer use it. The op has other checks, with messages for
// users.
void check(const AttentionArgs& args);
void check(const BackwardArgs& args);

}  // namespace flashattn::cpu
