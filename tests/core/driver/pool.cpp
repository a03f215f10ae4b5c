// Tests the thread pool. Prints a line for each expectation that fails.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <thread>
#include <vector>

#include "threads.h"

using namespace flashattn::cpu;

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (!holds) {
    std::printf("does not hold: %s\n", what);
    ++failures;
  }
}

// Whether two threads run at the same time. Each of two loop bodies waits up to 5 seconds for the other one to begin.
bool two_threads_meet() {
  std::atomic<int> inside{0};
  std::atomic<bool> met{true};
  parallel_for(2, [&](int64_t) {
    ++inside;
    for (int i = 0; i < 5000 && inside < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (inside < 2) met = false;
  });
  return met;
}

double processor_seconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// If a thread spun during the sleep, it would use ten times the processor time that is allowed here.
bool idle_afterwards() {
  parallel_for(100, [](int64_t) {});
  double before = processor_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return processor_seconds() - before < 0.02;
}

bool child_has_threads() {
  pid_t child = fork();
  if (child == 0) {
    alarm(10);  // ends a child that waits for a thread that it does not have
    _exit(two_threads_meet() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0;
}

void all_promises() {
  std::vector<std::atomic<int>> seen(10000);
  parallel_for(10000, [&](int64_t i) { ++seen[static_cast<size_t>(i)]; });
  bool once = true;
  for (auto& count : seen) once = once && count == 1;
  expect(once, "each index once");
  expect(two_threads_meet(), "two threads at work");

  bool caught = false;
  try {
    parallel_for(100, [](int64_t i) {
      if (i == 42) throw std::runtime_error("42");
    });
  } catch (const std::runtime_error& error) {
    caught = std::strcmp(error.what(), "42") == 0;
  }
  expect(caught, "an exception comes back");
  expect(two_threads_meet(), "the pool goes on after an exception");

  expect(idle_afterwards(), "an idle pool uses no processor");
  {
    ExpectedJob that_never_comes;
    expect(idle_afterwards(), "nor does it for long while a job is expected");
  }

  expect(child_has_threads(), "a forked child has threads of its own");

// Sanitizers skip this part. A child that is forked while other threads run may inherit a lock of the sanitizer's
// runtime that one of these threads holds.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  std::atomic<bool> enough{false};
  std::thread busy([&] {
    while (!enough) parallel_for(100, [](int64_t) {});
  });
  bool each = true;
  for (int i = 0; i < 20; ++i) each = each && child_has_threads();
  enough = true;
  busy.join();
  expect(each, "so has one that is forked in the midst of another thread's work");
#endif
}

void no_more_threads() {
  rlimit limit = {600u << 20, 600u << 20};  // address space for about 70 stacks
  setrlimit(RLIMIT_AS, &limit);
  std::atomic<int64_t> sum{0};
  parallel_for(100, [&](int64_t i) { sum += i; });
  expect(sum == 4950, "all work is done with the threads that could be had");
}

}  // namespace

int main(int argc, char**) {
  argc > 1 ? no_more_threads() : all_promises();
  return failures;
}
