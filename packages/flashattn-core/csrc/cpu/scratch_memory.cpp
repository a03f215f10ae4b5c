// Each thread frees its own memory, so that no thread has to wait for another.
#include "scratch_memory.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace flashattn::cpu {
namespace {

std::atomic<int64_t> period{0}, needed{0};  // needed: bytes, in this period

}  // namespace

ScratchMemory::~ScratchMemory() {
  std::free(memory_);
}

float* ScratchMemory::floats(int64_t count) {
  constexpr int64_t kLine = 64;
  int64_t bytes = (count * static_cast<int64_t>(sizeof(float)) + kLine - 1) / kLine * kLine, now = period;
  if (bytes > bytes_ || period_ != now) {
    int64_t counted = period_ == now ? bytes_ : 0;
    std::free(memory_);
    memory_ = static_cast<float*>(std::aligned_alloc(kLine, static_cast<size_t>(bytes)));
    bytes_ = memory_ ? bytes : 0;
    period_ = now;
    needed += bytes_ - counted;
    if (!memory_) {
      throw std::bad_alloc();
    }
  }
  return memory_;
}

int64_t renew_scratch() {
  ++period;
  return needed.exchange(0);
}

}  // namespace flashattn::cpu
