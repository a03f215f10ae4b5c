// How often each kernel has run.
#pragma once

#include <array>
#include <cstdint>

#include "../call/kernel_table.h"

namespace flashattn {

void count(Kernel kernel);

// Calls of each kernel that have been evaluated since the start, or since reset_calls().
std::array<uint64_t, kNumKernels> calls();
void reset_calls();

}  // namespace flashattn
