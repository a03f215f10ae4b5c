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

  // Room for `count` floats, on a cache line. Earlier contents may be lost. Throws std::bad_alloc.
  float* floats(int64_t count);

 private:
  float* memory_ = nullptr;
  int64_t bytes_ = 0;
  int64_t period_ = 0;  // renew_scratch() begins a new period
};

// Each thread, at its next block, replaces its scratch by as much as that block needs. Returns how many bytes of
// scratch all threads together needed since the last call of this function.
int64_t renew_scratch();

}  // namespace flashattn::cpu
