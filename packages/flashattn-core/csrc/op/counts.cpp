// A counter for each kernel.
#include "counts.h"

#include <atomic>

namespace flashattn {
namespace {

std::array<std::atomic<uint64_t>, kNumKernels> counts;
thread_local int uncounted = 0;

}  // namespace

Uncounted::Uncounted() {
  ++uncounted;
}
Uncounted::~Uncounted() {
  --uncounted;
}

void count(Kernel kernel) {
  if (uncounted > 0) return;
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
