// Addresses in shared memory, named barriers (where some warps of a block meet), fences and atomics.
#include "cuda.h"
#include "failure.h"
#include "memory.h"
#include "threads.h"

namespace {

// The first address is not 0. So a kernel that passes an offset in place of an address fails.
constexpr unsigned kFirstAddress = 1024;

struct NamedBarrier {
  unsigned long threadgroup, times_opened;
  int arrived;
  Clock before, opened;
};

unsigned long fences[1024];  // per thread: number of the threadgroup in which the thread last called cuda_fence()

struct Arrival {
  const NamedBarrier* barrier;
  unsigned long times_opened;
};

}  // namespace

extern "C" {
extern void* cuda_dynamic_memory();  // translate.py generates the definition

void* cuda_shared_pointer(unsigned address) {
  return static_cast<char*>(cuda_dynamic_memory()) + address - kFirstAddress;
}

unsigned cuda_shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const char*>(pointer) - static_cast<char*>(cuda_dynamic_memory())) +
         kFirstAddress;
}

void cuda_fail(const char* message) {
  fail("MetalError", "%s, by %s at " PC_FORMAT, message, describe(*current_thread).c_str(),
       reinterpret_cast<long>(__builtin_return_address(0)) - 1);
}

void cuda_fence() {
  fences[current_thread->index] = threadgroup_number;
}

unsigned cuda_atomic_add(unsigned* to, unsigned added) {
  const bool is_published = fences[current_thread->index] == threadgroup_number;
  meet_threadgroups(to, sizeof *to, is_published, __builtin_return_address(0));
  const unsigned before = *to;
  *to += added;
  return before;
}

void cuda_named_barrier(int number, int threads, const char* file, int line) {
  static NamedBarrier barriers[16];
  if (number < 1 || number > 15 || threads % kLanes) cuda_fail("barriers 1 to 15 are there, for whole warps");
  NamedBarrier& barrier = barriers[number];
  if (barrier.threadgroup != threadgroup_number) barrier = {threadgroup_number, 0, 0, {}, {}};
  release(barrier.before);
  if (++barrier.arrived == threads) {
    barrier.opened = barrier.before;
    barrier.before = {};
    barrier.arrived = 0;
    barrier.times_opened++;
  } else {
    const Arrival arrival = {&barrier, barrier.times_opened};
    const auto is_open = [](const void* subject) {
      const auto* own = static_cast<const Arrival*>(subject);
      return own->barrier->times_opened != own->times_opened;
    };
    msl_wait(is_open, &arrival, "a barrier for some warps", file, line);
  }
  current_thread->sequence++;
  acquire(barrier.opened);
}
}
