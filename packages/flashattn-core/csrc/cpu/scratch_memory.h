// Memory that a thread works in and keeps for its next block. The C library allocates it: MLX counts none of it.
#pragma once

#include <cstdint>

namespace flashattn::cpu {

class ScratchMemory {
 public:
  ScratchMemory() = default;
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
  ~ScratchMemory();

  // Room for so many floats, on a cache line. What was there before is lost. Throws std::bad_alloc.
  float* floats(int64_t count);

 private:
  float* memory_ = nullptr;
  int64_t bytes_ = 0;
  int64_t period_ = 0;  // between two calls of renew_scratch()
};

// From now on each thread replaces its scratch, at its next block, by as much as that needs. Returns how many bytes of
// scratch the blocks since the last call of this function needed, of all threads together.
int64_t renew_scratch();

}  // namespace flashattn::cpu
