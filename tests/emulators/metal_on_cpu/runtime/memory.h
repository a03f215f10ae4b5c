// All memory of a kernel: one reserved range of addresses, in which each buffer and each threadgroup array has a slot
// of its own. The rest of each slot is a guard, so that every access out of bounds is recognised.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "counters.h"

constexpr int kSlotBits = 31;
constexpr size_t kSlotSize = size_t{1} << kSlotBits;
constexpr size_t kMaxBytes = kSlotSize / 2;  // half of a slot, the rest is guard
constexpr int kBufferSlots = 0;
constexpr int kVariableSlots = kBufferSlots + kMaxBuffers;
constexpr int kSlots = kVariableSlots + 64;
constexpr size_t kArenaSize = kSlots * kSlotSize;

// Accesses by lanes of one SIMD group between two of its operations.
struct Access {
  uint32_t epoch;                 // a new number after each barrier and in each threadgroup; 0: no access
  uint32_t sequence;              // how many operations of the SIMD group came before
  uint32_t lanes;                 // a bit for each lane; 0 in a write: an asynchronous copy not yet finished
  uint32_t program_counter : 27;  // enough: programs are small, at low addresses
  uint32_t simdgroup : 5;
};

// The history of a few neighbouring bytes.
struct Cell {
  Access write;
  Access reads[2];      // by different SIMD groups
  Access earlier_read;  // by an earlier threadgroup
};

struct Slot {
  char* begin;
  size_t size;
  Cell* cells;
  int cell_bits;  // log2 of the bytes in a cell
  Space space;
  bool is_bound;
  bool is_read_only;
  bool is_undefined;  // contents mean nothing until the kernel has written them
  int index;
  const char* name;
};
inline Slot slots[kSlots];
inline char* arena;

void reserve_arena();
// Gives the slot `size` bytes of zeros, at an address aligned to a page.
Slot& allocate(int slot, size_t size, Space space, const char* name, int index);
// Records the history of each byte of the slot from now on.
void track(Slot& slot);
size_t count_unwritten(const Slot& slot, size_t element_size);

// Both begin new epochs, pass_barrier() only for the spaces in `fence`.
void begin_threadgroup();
void pass_barrier(int fence);

// A vector clock, a moment: all that each SIMD group did up to epoch `before` comes before it.
struct Clock {
  uint32_t before[kSpaces][32];
};
// Adds to the clock all that the current SIMD group has done so far, and all that it has acquired.
void release(Clock& clock);
// Orders all that is in the clock before all that the current SIMD group will do.
void acquire(const Clock& clock);

// An atomic read and write. If `is_published`, what this threadgroup has done so far comes before what other
// threadgroups do after their next atomic operation on this address.
void meet_threadgroups(const void* address, size_t size, bool is_published, const void* return_address);

// An asynchronous write lasts from begin_write() to end_write(), or to a write by access_memory(). Meanwhile nobody may
// read these bytes.
void begin_write(void* address, size_t size, const void* return_address);
void end_write(void* address, size_t size);

// Checks, counts and records an access of a kernel.
void access_memory(const void* address, size_t size, bool is_write, const void* return_address);
