// One pool of worker threads for the process. Idle workers sleep.
#pragma once

#include <cstdint>
#include <functional>

namespace flashattn::cpu {

// The number of threads that a job may use, including the thread that calls parallel_for(). It is FLASHATTN_NUM_THREADS
// or, if that is not set, the number of processors that the affinity mask and the cgroup's quota leave to this process.
// Throws std::invalid_argument if FLASHATTN_NUM_THREADS is not a whole number from 1 to 1024.
int num_threads();

// Calls body(0) ... body(count - 1), each once, in any order, on up to num_threads() threads, and returns when all have
// finished. If a call throws, no further call begins, and parallel_for() rethrows the exception. Several threads may
// call parallel_for() at the same time. After a fork the child starts a pool of its own.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body);

// While an object of this class exists, a worker that has finished a job waits for the next one for up to 0.1 ms before
// it sleeps. Waking a thread takes tens of microseconds, as long as a whole decode step.
class ExpectedJob {
 public:
  ExpectedJob();
  ExpectedJob(const ExpectedJob&);
  ExpectedJob& operator=(const ExpectedJob&) = default;
  ~ExpectedJob();
};

}  // namespace flashattn::cpu
