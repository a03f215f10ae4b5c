// How often each kernel has run.
#pragma once

#include <array>
#include <cstdint>

#include "../call/kernel_table.h"

namespace flashattn {

void count(Kernel kernel);

// While one lives, its thread's calls are not counted.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
};

// Calls of each kernel that have been evaluated since the start, or since reset_calls().
std::array<uint64_t, kNumKernels> calls();
void reset_calls();

}  // namespace flashattn
