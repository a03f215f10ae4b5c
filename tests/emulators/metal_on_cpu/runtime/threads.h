// The threads of a threadgroup are fibers. One fiber runs at a time.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"

enum class State { kReady, kAtOperation, kAtBarrier, kWaiting, kReturned };

struct Thread {
  void* stack_pointer;
  char* stack;
  State state;
  int index;
  uint32_t sequence;  // how many operations its SIMD group has performed so far
  const MslOperation* operation;
  int fence;
  bool condition;                // this thread's condition; after the barrier, the AND over all threads
  bool (*is_over)(const void*);  // whether the wait for `subject` is over
  const void* subject;
  const char* waits_in;
  MslLane lane;
  const char* file = "";  // the thread waits at `line` of this file
  int line;
  MslThread arguments;
};

struct Schedule {
  enum Kind { kForward, kReverse, kGreedy, kRandom } kind;
  uint64_t random_state;
  uint64_t random(uint64_t bound);
};

inline Thread* current_thread;  // null while the scheduler runs
inline unsigned current_threadgroup[3];
inline unsigned long threadgroup_number;  // counts threadgroups that have begun

void create_threads(int count);
bool is_stack_guard(const void* address, int* thread);
bool is_private(const void* address);  // whether `address` is in the current thread's stack or arguments
std::string describe(const Thread& thread);
void run_threadgroup(const MslKernel& kernel, const unsigned position[3], const unsigned grid[3],
                     const unsigned size[3], void* const* buffers, Schedule& schedule);
