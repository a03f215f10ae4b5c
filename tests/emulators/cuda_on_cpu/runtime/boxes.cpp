// mbarriers are barriers in shared memory that count arrivals and bytes. Bulk copies deliver the bytes.
#include <cstring>
#include <map>
#include <vector>

#include "cuda.h"
#include "hopper.h"
#include "memory.h"
#include "threads.h"

namespace {

constexpr int kRowBytes = 128;  // a row of a tensor map's box: 64 elements of 16 bits

struct BoxRow {
  char* to;
  const char* from;  // null if the row is outside of the array
  int bytes;         // how many bytes of the row are in the array
  bool swizzled = true;
};
struct Barrier {
  unsigned long threadgroup, times_opened;
  int arrivals, missing;
  long expected_bytes;
  std::vector<BoxRow> rows;  // the rows of the copies that are not finished
  Clock before, opened;
};

Barrier& barrier_at(unsigned address) {
  static std::map<unsigned, Barrier> barriers;
  return barriers[address];
}
Barrier& initialised(unsigned address) {
  Barrier& barrier = barrier_at(address);
  if (barrier.threadgroup != threadgroup_number) cuda_fail("a barrier that nobody has initialised");
  return barrier;
}

// Finishes the copies and opens the barrier if no arrival is missing and all expected bytes are being copied.
void open_if_complete(Barrier& barrier) {
  if (barrier.missing || barrier.expected_bytes != kRowBytes * static_cast<long>(barrier.rows.size())) return;
  for (const BoxRow& row : barrier.rows) {
    char content[kRowBytes] = {};
    if (row.from) memcpy(content, row.from, row.bytes);
    const unsigned address = cuda_shared_address(row.to);
    for (unsigned piece = 0; piece < kRowBytes; piece += 16) {
      const unsigned to = address + piece, swizzle = row.swizzled ? (to >> 7 & 7) << 4 : 0;
      memcpy(row.to + (to ^ swizzle) - address, content + piece, 16);
    }
    end_write(row.to, kRowBytes);
  }
  barrier.rows.clear();
  barrier.expected_bytes = 0;
  barrier.missing = barrier.arrivals;
  barrier.opened = barrier.before;
  barrier.times_opened++;
}

struct Wait {
  Barrier* barrier;
  int parity;
};

}  // namespace

extern "C" {
void cuda_barrier_init(unsigned address, int arrivals) {
  access_memory(cuda_shared_pointer(address), 8, true, __builtin_return_address(0));
  barrier_at(address) = {threadgroup_number, 0, arrivals, arrivals, 0, {}, {}, {}};
}

void cuda_barrier_arrive(unsigned address, int expected_bytes) {
  Barrier& barrier = initialised(address);
  barrier.expected_bytes += expected_bytes;
  release(barrier.before);
  if (--barrier.missing < 0) cuda_fail("more arrivals than the barrier waits for");
  if (barrier.expected_bytes == 0) open_if_complete(barrier);
}

void cuda_barrier_wait(unsigned address, int parity, const char* file, int line) {
  const Wait wait = {&initialised(address), parity};
  const auto is_over = [](const void* subject) {
    const auto* own = static_cast<const Wait*>(subject);
    if (own->barrier->times_opened % 2 == static_cast<unsigned long>(own->parity)) open_if_complete(*own->barrier);
    return own->barrier->times_opened % 2 != static_cast<unsigned long>(own->parity);
  };
  msl_wait(is_over, &wait, "a barrier in shared memory", file, line);
  current_thread->sequence++;
  acquire(wait.barrier->opened);
}

void cuda_copy_box(unsigned to, const CudaMap* map, int column, int row, int head, int batch, unsigned address) {
  const void* place = __builtin_return_address(0);
  Barrier& barrier = initialised(address);
  if (to % 1024 % kRowBytes) cuda_fail("a box at an address that is no multiple of 128");
  const long inside = map->sizes[0] - column < 64 ? map->sizes[0] - column : 64;
  for (int r = 0; r < map->box_rows; r++) {
    BoxRow box = {static_cast<char*>(cuda_shared_pointer(to + r * kRowBytes)), nullptr, static_cast<int>(2 * inside)};
    if (row + r < map->sizes[1] && head < map->sizes[2] && batch < map->sizes[3] && inside > 0) {
      box.from = map->address + 2 * column + (row + r) * map->steps[1] + head * map->steps[2] + batch * map->steps[3];
      access_memory(box.from, box.bytes, false, place);
    }
    begin_write(box.to, kRowBytes, place);
    barrier.rows.push_back(box);
  }
  release(barrier.before);
}

void cuda_copy_bytes(unsigned to, const void* from, int bytes, unsigned address) {
  const void* place = __builtin_return_address(0);
  Barrier& barrier = initialised(address);
  if (to % 16 || reinterpret_cast<unsigned long>(from) % 16 || bytes % kRowBytes)
    cuda_fail("a copy of no whole pieces");
  for (int n = 0; n < bytes; n += kRowBytes) {
    BoxRow row = {static_cast<char*>(cuda_shared_pointer(to + n)), static_cast<const char*>(from) + n, kRowBytes,
                  false};
    access_memory(row.from, kRowBytes, false, place);
    begin_write(row.to, kRowBytes, place);
    barrier.rows.push_back(row);
  }
  release(barrier.before);
}
}
