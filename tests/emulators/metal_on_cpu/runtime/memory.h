// All memory of a kernel lies in one reserved range of addresses. The range is divided into slots, one for each buffer
// and each threadgroup array. The rest of a slot is a guard, so that an access beyond the array is recognised.
#pragma once
#include <cstddef>
#include <cstdint>

#include "abi.h"
#include "counters.h"

constexpr int kSlotBits = 31;
constexpr size_t kSlotSize = size_t{1} << kSlotBits;
constexpr size_t kMaxBytes = kSlotSize / 2;  // at least half of each slot is a guard
constexpr int kBufferSlots = 0;
constexpr int kVariableSlots = kBufferSlots + kMaxBuffers;
constexpr int kSlots = kVariableSlots + 64;
constexpr size_t kArenaSize = kSlots * kSlotSize;

// All accesses to some bytes that the lanes of a SIMD group make between two SIMD-group operations.
struct Access {
  uint32_t epoch;                 // grows with each threadgroup, barrier and release(); 0: no access yet
  uint32_t sequence;              // how many operations the SIMD group had performed before
  uint32_t lanes;                 // a bit for each lane; 0 for an asynchronous write that has not ended
  uint32_t program_counter : 27;  // 27 bits are enough, because programs are small and lie at low addresses
  uint32_t simdgroup : 5;
};

// The history of a few neighbouring bytes.
struct Cell {
  Access write;
  Access reads[2];      // the latest reads by two different SIMD groups
  Access earlier_read;  // a read by an earlier threadgroup
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
// Allocates `size` bytes of zeros in the slot, at an address aligned to a page.
Slot& allocate(int slot, size_t size, Space space, const char* name, int index);
// From now on, accesses to the slot are recorded.
void track(Slot& slot);
size_t count_unwritten(const Slot& slot, size_t element_size);

// begin_threadgroup() begins a new epoch in every address space. pass_barrier() does so in the spaces in `fence` only.
void begin_threadgroup();
void pass_barrier(int fence);

// A vector clock: it covers each SIMD group's accesses in the epochs up to before[space][group].
struct Clock {
  uint32_t before[kSpaces][32];
};
// Adds to the clock all accesses that the current SIMD group has made or acquired so far.
void release(Clock& clock);
// From now on, all accesses in the clock happen before the accesses of the current SIMD group.
void acquire(const Clock& clock);

// Records an atomic operation on `address`. If `is_published`, all accesses that happen before it are published. A
// later threadgroup acquires them by an atomic operation on the same address.
void meet_threadgroups(const void* address, size_t size, bool is_published, const void* return_address);

// An asynchronous write lasts from begin_write() to end_write(), or to the next ordinary write of these bytes. Until
// then no thread may read the bytes.
void begin_write(void* address, size_t size, const void* return_address);
void end_write(void* address, size_t size);

// Refuses an access that a GPU refuses. An x86-64 processor would carry it out.
void check_alignment(const void* address, size_t alignment, const void* return_address);

// Checks an access of the kernel, adds its bytes to the counters, and records it in the history of the bytes.
void access_memory(const void* address, size_t size, bool is_write, const void* return_address);
