// Working memory that a thread keeps for its next block. It comes from the C library: MLX's counters do not see it.
#pragma once

#include <cstdint>

namespace flashattn::cpu {

// One use in one thread. Only that thread asks for memory, and only while it works on a job.
class KeptMemory {
 public:
  KeptMemory() = default;
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory();

  // Room for so many floats, on a cache line. What was there before is lost. Throws std::bad_alloc.
  float* floats(int64_t count);

 private:
  friend struct KeptMemoryList;
  float* memory_ = nullptr;
  int64_t capacity_ = 0;
  // The list of all. It is made of these, so that nothing is allocated for it: its memory could not be had, either.
  KeptMemory *previous_ = nullptr, *next_ = nullptr;
  int64_t list_ = 0;  // the number of the list that this one is in; 0: none
};

// While a thread has one of these, nobody frees what it keeps.
class KeptMemoryInUse {
 public:
  KeptMemoryInUse();
  KeptMemoryInUse(const KeptMemoryInUse&) = delete;
  KeptMemoryInUse& operator=(const KeptMemoryInUse&) = delete;
  ~KeptMemoryInUse();
};

// Waits for the jobs under way and frees what all threads keep. Returns how many bytes that was.
int64_t release_kept_memory();

}  // namespace flashattn::cpu
