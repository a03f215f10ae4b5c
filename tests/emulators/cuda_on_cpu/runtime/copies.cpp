// cp.async. A copy is under way until its thread waits for it. Until then no thread may read the bytes that it writes.
#include <deque>
#include <vector>

#include <cstring>

#include "cuda.h"
#include "memory.h"
#include "threads.h"

namespace {

struct Copy {
  char* to;
  const char* from;
  int size;
  int bytes;
  const void* place;  // where the kernel starts the copy: the return address of cuda_copy()
};
struct Copies {
  unsigned long threadgroup;
  std::vector<Copy> not_committed;
  std::deque<std::vector<Copy>> groups;
};

Copies& own_copies() {
  static std::vector<Copies> of_threads(1024);
  Copies& copies = of_threads[current_thread->index];
  if (copies.threadgroup != threadgroup_number) copies = {threadgroup_number, {}, {}};
  return copies;
}

}  // namespace

extern "C" {
void cuda_copy(unsigned to, const void* from, int size, int bytes) {
  if (to % size || reinterpret_cast<unsigned long>(from) % size)
    cuda_fail("cp.async of addresses that are no multiples of its size");
  const Copy copy = {static_cast<char*>(cuda_shared_pointer(to)), static_cast<const char*>(from), size, bytes,
                     __builtin_return_address(0)};
  if (bytes) access_memory(from, bytes, false, copy.place);
  begin_write(copy.to, size, copy.place);
  own_copies().not_committed.push_back(copy);
}

void cuda_commit_copies() {
  Copies& copies = own_copies();
  copies.groups.push_back(std::move(copies.not_committed));
  copies.not_committed.clear();
}

void cuda_wait_for_copies(int under_way) {
  auto& groups = own_copies().groups;
  for (; groups.size() > static_cast<size_t>(under_way); groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      access_memory(copy.to, copy.size, true, copy.place);
      memset(copy.to, 0, copy.size);
      memcpy(copy.to, copy.from, copy.bytes);
    }
  }
}
}
