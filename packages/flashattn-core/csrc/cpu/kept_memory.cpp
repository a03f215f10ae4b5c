// The list of all that threads keep, and the lock that tells whether they work.
#include "kept_memory.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <set>
#include <shared_mutex>

namespace flashattn::cpu {
namespace {

struct Registry {
  std::shared_mutex in_use;  // shared by the threads that work
  std::mutex mutex;          // guards the set
  std::set<KeptMemory*> kept;
};

// Never destroyed: threads may outlive static destruction at exit. A forked child has none of the parent's threads and
// perhaps their locks, so it forgets the parent's and makes another.
std::atomic<Registry*> current{nullptr};

Registry& registry() {
  if (Registry* existing = current.load(std::memory_order_acquire)) {
    return *existing;
  }
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { current.store(nullptr, std::memory_order_relaxed); });
  (void)registered;
  auto* made = new Registry;
  Registry* expected = nullptr;
  if (!current.compare_exchange_strong(expected, made)) {
    delete made;
    return *expected;
  }
  return *made;
}

}  // namespace

KeptMemory::~KeptMemory() {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  all.kept.erase(this);
  std::free(memory_);
}

float* KeptMemory::floats(int64_t count) {
  if (count > capacity_) {
    Registry& all = registry();
    std::lock_guard lock(all.mutex);
    all.kept.insert(this);
    std::free(memory_);
    memory_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(count + 15) / 16 * 64));
    capacity_ = memory_ ? count : 0;
    if (!memory_) {
      throw std::bad_alloc();
    }
  }
  return memory_;
}

KeptMemoryInUse::KeptMemoryInUse() {
  registry().in_use.lock_shared();
}
KeptMemoryInUse::~KeptMemoryInUse() {
  registry().in_use.unlock_shared();
}

int64_t release_kept_memory() {
  Registry& all = registry();
  std::lock_guard idle(all.in_use);
  std::lock_guard lock(all.mutex);
  int64_t floats = 0;
  for (KeptMemory* each : all.kept) {
    floats += each->capacity_;
    std::free(each->memory_);
    each->memory_ = nullptr;
    each->capacity_ = 0;
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

}  // namespace flashattn::cpu
