// How often each kernel has run, and how often a call was left to MLX because of a kernel's cost.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "../call/choose.h"

namespace flashattn {

using Counts = std::array<std::atomic<uint64_t>, kNumKernels>;

// Both count calls since the start, or since the last reset_stats() or reset_left_calls() in Python. left_calls counts
// by the kernel whose cost decided, see compared_kernel().
inline Counts computed_calls, left_calls;

inline void count(Kernel kernel, Counts& counts = computed_calls) {
  counts[static_cast<int>(kernel)].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace flashattn
