// Implements the thread pool and parallel_for().
#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>

#include <algorithm>
#include <fstream>
#endif
#include <pthread.h>

#include "kept_memory.h"

namespace flashattn::cpu {
namespace {

constexpr int kMaxThreads = 1024;

int available_processors() {
#ifdef __linux__
  int processors = 0;
  cpu_set_t affinity;
  if (sched_getaffinity(0, sizeof(affinity), &affinity) == 0) {
    processors = CPU_COUNT(&affinity);
  }
  // The file of a cgroup v2 quota: "<microseconds per period> <period>", or "max <period>".
  std::ifstream quota_file("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  if (processors > 0 && quota_file >> quota >> period && quota > 0 && period > 0) {
    processors = std::min(processors, std::max(1, static_cast<int>(quota / period + 0.5)));
  }
  if (processors > 0) {
    return std::min(processors, kMaxThreads);
  }
#endif
  int hardware = static_cast<int>(std::thread::hardware_concurrency());
  return hardware > 0 ? hardware : 1;
}

int read_num_threads() {
  const char* text = std::getenv("FLASHATTN_NUM_THREADS");
  if (text == nullptr) {
    return available_processors();
  }
  char* end = nullptr;
  long threads = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("[flash_attention] FLASHATTN_NUM_THREADS is '" + std::string(text) +
                                "', expected a whole number from 1 to " + std::to_string(kMaxThreads));
  }
  return static_cast<int>(threads);
}

std::atomic<int> expected_jobs{0};

// Waits without sleeping, for at most 0.1 ms, for a condition that is expected to hold soon. Meanwhile it yields the
// processor.
template <typename Condition>
void wait_awake(Condition holds) {
  constexpr auto kPatience = std::chrono::microseconds(100);
  auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!holds() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
}

// A parallel_for() that is running. Each thread takes the next index until none is left.
struct Job {
  const std::function<void(int64_t)>& body;
  const int64_t count;
  std::atomic<int64_t> next{0};
  std::atomic<int> helpers{0};         // pool threads inside run(); changed under the pool's mutex
  std::exception_ptr error = nullptr;  // the first exception; guarded by error_mutex
  std::mutex error_mutex = {};

  void run() {
    KeptMemoryInUse in_use;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      try {
        body(i);
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) {
          error = std::current_exception();
        }
        next.store(count, std::memory_order_relaxed);  // the other indices need not run any more
      }
    }
  }
};

class Pool {
 public:
  explicit Pool(int workers) {
    try {
      for (int i = 0; i < workers; ++i) {
        std::thread([this] { work(); }).detach();
      }
    } catch (...) {
      // The system has no more threads, or no memory for them. The exception ends here, because a constructor that
      // throws destroys its object, and the threads that did start use it. A pool without threads works, too, because
      // the thread that calls run() works on the job.
    }
  }

  void run(Job& job) {
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(&job);
      open_jobs_ = jobs_.size();
    }
    work_available_.notify_all();
    job.run();
    std::unique_lock lock(mutex_);
    close(job);
    if (job.helpers > 0) {  // pool threads still work on the job's last indices
      lock.unlock();
      wait_awake([&] { return job.helpers == 0; });
      lock.lock();
    }
    helper_left_.wait(lock, [&] { return job.helpers == 0; });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_available_.wait(lock, [&] { return !jobs_.empty(); });
      Job& job = *jobs_.front();
      ++job.helpers;
      lock.unlock();
      job.run();
      lock.lock();
      close(job);
      --job.helpers;
      helper_left_.notify_all();
      if (jobs_.empty() && expected_jobs > 0) {
        lock.unlock();
        wait_awake([&] { return open_jobs_ > 0 || expected_jobs == 0; });
        lock.lock();
      }
    }
  }

  void close(Job& job) {  // removes a job that has no index left
    jobs_.remove(&job);
    open_jobs_ = jobs_.size();
  }

  std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable helper_left_;
  std::list<Job*> jobs_;
  std::atomic<size_t> open_jobs_{0};  // jobs_.size(), readable without the mutex
};

// The pool is never destroyed, because its threads may outlive static destruction at exit. A forked child has none of
// the parent's threads, so it forgets the parent's pool and makes another when it needs one.
std::atomic<Pool*> pool{nullptr};
std::mutex pool_mutex;

Pool& the_pool() {
  if (Pool* existing = pool.load(std::memory_order_acquire)) {
    return *existing;
  }
  std::lock_guard lock(pool_mutex);
  if (pool.load(std::memory_order_relaxed) == nullptr) {
    static const int registered = pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
                                                 [] {
                                                   pool.store(nullptr, std::memory_order_relaxed);
                                                   expected_jobs = 0;
                                                   pool_mutex.unlock();
                                                 });
    (void)registered;
    pool.store(new Pool(num_threads() - 1), std::memory_order_release);
  }
  return *pool.load(std::memory_order_relaxed);
}

}  // namespace

int num_threads() {
  static const int threads = read_num_threads();  // if this throws, the next call tries again
  return threads;
}

ExpectedJob::ExpectedJob() {
  ++expected_jobs;
}
ExpectedJob::ExpectedJob(const ExpectedJob&) : ExpectedJob() {}
ExpectedJob::~ExpectedJob() {
  --expected_jobs;
}

void parallel_for(int64_t count, const std::function<void(int64_t)>& body) {
  Job job{body, count};
  if (count <= 1 || num_threads() == 1) {
    job.run();
  } else {
    the_pool().run(job);
  }
  if (job.error) {
    std::rethrow_exception(job.error);
  }
}

}  // namespace flashattn::cpu
