// How often each kernel has run.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "../call/choose.h"

namespace flashattn {

// For each kernel, how many calls it has computed since the start, or since the last reset_stats() in Python.
inline std::array<std::atomic<uint64_t>, kNumKernels> counts;

inline void count(Kernel kernel) {
  counts[static_cast<int>(kernel)].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace flashattn
