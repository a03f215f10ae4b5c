// The list of all memory that threads keep, and the lock that a thread holds while it works.
#include "kept_memory.h"

#include <pthread.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <shared_mutex>

namespace flashattn::cpu {

struct KeptMemoryList {
  std::shared_mutex in_use = {};  // each thread holds a shared lock on this mutex while it works on a job
  std::mutex mutex = {};          // guards the list
  KeptMemory* first = nullptr;
  int64_t number;

  explicit KeptMemoryList(int64_t number) : number(number) {}

  void add(KeptMemory& kept) {
    if (kept.list_ == number) {
      return;
    }
    kept.list_ = number;
    kept.previous_ = nullptr;
    kept.next_ = first;
    if (first) {
      first->previous_ = &kept;
    }
    first = &kept;
  }
  void remove(KeptMemory& kept) {
    if (kept.list_ != number) {
      return;
    }
    (kept.previous_ ? kept.previous_->next_ : first) = kept.next_;
    if (kept.next_) {
      kept.next_->previous_ = kept.previous_;
    }
  }
  int64_t release() {
    int64_t floats = 0;
    for (KeptMemory* each = first; each; each = each->next_) {
      floats += each->capacity_;
      std::free(each->memory_);
      each->memory_ = nullptr;
      each->capacity_ = 0;
    }
    return floats;
  }
};

namespace {

// The list is in static memory, because an allocation could fail. It is never destroyed, because threads may outlive
// static destruction at exit. A forked child begins a new list, because threads that do not exist in the child may hold
// the old list's locks.
alignas(KeptMemoryList) unsigned char storage[sizeof(KeptMemoryList)];

KeptMemoryList& list() {
  static KeptMemoryList* const made = [] {
    pthread_atfork(nullptr, nullptr, [] { new (storage) KeptMemoryList(list().number + 1); });
    return new (storage) KeptMemoryList(1);
  }();
  return *made;
}

}  // namespace

KeptMemory::~KeptMemory() {
  KeptMemoryList& all = list();
  std::lock_guard lock(all.mutex);
  all.remove(*this);
  std::free(memory_);
}

void KeptMemory::lay_out(std::initializer_list<Array> arrays) {
  constexpr int64_t kLine = 16;  // floats
  int64_t count = 0;
  for (const Array& array : arrays) count += (array.size + kLine - 1) / kLine * kLine;
  if (count > capacity_ || list_ != list().number) {
    KeptMemoryList& all = list();
    std::lock_guard lock(all.mutex);
    all.add(*this);
    if (count > capacity_) {
      std::free(memory_);
      memory_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(count) * sizeof(float)));
      capacity_ = memory_ ? count : 0;
    }
    if (!memory_) {
      throw std::bad_alloc();
    }
  }
  float* next = memory_;
  for (const Array& array : arrays) {
    *array.start = next;
    next += (array.size + kLine - 1) / kLine * kLine;
  }
}

KeptMemoryInUse::KeptMemoryInUse() {
  list().in_use.lock_shared();
}
KeptMemoryInUse::~KeptMemoryInUse() {
  list().in_use.unlock_shared();
}

int64_t release_kept_memory() {
  KeptMemoryList& all = list();
  std::lock_guard idle(all.in_use);
  std::lock_guard lock(all.mutex);
  return all.release() * static_cast<int64_t>(sizeof(float));
}

}  // namespace flashattn::cpu
