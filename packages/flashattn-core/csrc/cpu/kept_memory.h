// Working memory that a thread keeps for its next block. It comes from the C library, so MLX does not count it.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace flashattn::cpu {

// The memory of one thread for one purpose. Only that thread calls lay_out(), and only while it works on a job.
class KeptMemory {
 public:
  KeptMemory() = default;
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory();

  struct Array {
    float** start;
    int64_t size;
  };
  // Makes each array begin on a cache line and have `size` floats. Earlier contents are lost. Throws std::bad_alloc.
  void lay_out(std::initializer_list<Array> arrays);

 private:
  friend struct KeptMemoryList;
  float* memory_ = nullptr;
  int64_t capacity_ = 0;
  // Neighbours in the list of all KeptMemory objects. They are members, because allocating a list node could fail.
  KeptMemory *previous_ = nullptr, *next_ = nullptr;
  int64_t list_ = 0;  // the number of the list that this object is in; 0 if it is in none
};

// While an object of this class exists, release_kept_memory() waits.
class KeptMemoryInUse {
 public:
  KeptMemoryInUse();
  KeptMemoryInUse(const KeptMemoryInUse&) = delete;
  KeptMemoryInUse& operator=(const KeptMemoryInUse&) = delete;
  ~KeptMemoryInUse();
};

// Waits until no job runs, then frees the memory that threads keep. Returns the number of bytes that it freed.
int64_t release_kept_memory();

}  // namespace flashattn::cpu
