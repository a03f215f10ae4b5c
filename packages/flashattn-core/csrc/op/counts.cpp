// A counter for each kernel.
#include "counts.h"

#include <atomic>

namespace flashattn {
namespace {

std::array<std::atomic<uint64_t>, kNumKernels> counts;

}  // namespace

void count(Kernel kernel) {
  counts[static_cast<int>(kernel)].fetch_add(1, std::memory_order_relaxed);
}

std::array<uint64_t, kNumKernels> calls() {
  std::array<uint64_t, kNumKernels> result;
  for (int i = 0; i < kNumKernels; ++i) {
    result[i] = counts[i].load(std::memory_order_relaxed);
  }
  return result;
}

void reset_calls() {
  for (auto& count : counts) {
    count.store(0, std::memory_order_relaxed);
  }
}

}  // namespace flashattn
