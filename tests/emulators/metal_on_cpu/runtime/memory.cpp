// Checks that each access is within its slot, and compares the access with earlier accesses to the same bytes.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "failure.h"
#include "threads.h"

extern "C" char __executable_start, _end;

namespace {

constexpr size_t kPage = 4096;
uint32_t last_epoch[kSpaces];
uint32_t first_epoch[kSpaces];  // the epoch in which the current threadgroup began
uint32_t epoch[kSpaces][32];    // the current epoch of each SIMD group
Clock known[32];                // per SIMD group: the accesses that happen before its next access

// The accesses that happen before an atomic operation on `address` by an earlier threadgroup.
struct Published {
  const void* address;
  uint32_t first_epoch[kSpaces];
  Clock clock;
};
std::vector<Published> published;
std::set<size_t> acquired[32];  // indices into `published`, for each SIMD group

void begin_epoch(int space) {
  ++last_epoch[space];
  for (int group = 0; group < 32; group++) {
    epoch[space][group] = last_epoch[space];
    for (uint32_t& before : known[group].before[space]) before = last_epoch[space] - 1;
  }
}

void join(Clock& clock, const Clock& other) {
  for (int space = 0; space < kSpaces; space++) {
    for (int group = 0; group < 32; group++) {
      clock.before[space][group] = std::max(clock.before[space][group], other.before[space][group]);
    }
  }
}

uint32_t simdgroup() {
  return static_cast<uint32_t>(current_thread->index / kLanes);
}

void* map(size_t size, int protection) {
  void* memory = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("MetalError", "cannot reserve %zu bytes of addresses", size);
  return memory;
}

size_t cell_count(const Slot& slot) {
  return (slot.size >> slot.cell_bits) + 1;
}

long code_address(const void* return_address) {
  return reinterpret_cast<long>(return_address) - 1;
}

std::string name(const Slot& slot) {
  if (slot.space != kThreadgroup) return "buffer " + std::to_string(slot.index) + " (" + slot.name + ")";
  return std::string("threadgroup array '") + slot.name + "'";
}

std::string here() {
  char text[96];
  snprintf(text, sizeof text, " of threadgroup (%u, %u, %u)", current_threadgroup[0], current_threadgroup[1],
           current_threadgroup[2]);
  return describe(*current_thread) + text;
}

std::string who(const Access& access) {
  std::string text = "simdgroup " + std::to_string(access.simdgroup) + ", lanes";
  int named = 0;
  for (int lane = 0; lane < kLanes; lane++) {
    if (access.lanes >> lane & 1) {
      if (++named > 4) return text + " …";
      text += " " + std::to_string(lane);
    }
  }
  return text;
}

[[noreturn]] void race(const Slot& slot, size_t offset, const Access& past, bool past_is_write, const Access& now,
                       bool is_write) {
  const bool is_other_threadgroup = past.epoch < first_epoch[slot.space];
  fail("RaceError",
       "%s, byte %zu of %zu: %s by %s at " PC_FORMAT "\n  and, with no barrier in between, %s by %s%s at " PC_FORMAT,
       name(slot).c_str(), offset, slot.size, is_write ? "written" : "read", here().c_str(), long{now.program_counter},
       past_is_write ? "written" : "read", who(past).c_str(),
       is_other_threadgroup ? " of another threadgroup" : " of the same threadgroup", long{past.program_counter});
}

[[noreturn]] void out_of_bounds(const Slot& slot, long offset, size_t size, bool is_write, long pc) {
  const char* verb = is_write ? "write" : "read";
  if (!slot.is_bound && slot.name) {
    fail("BindingError", "%s is %s but not bound, by %s at " PC_FORMAT, name(slot).c_str(),
         is_write ? "written" : "read", here().c_str(), pc);
  }
  if (!slot.name) {
    fail("OutOfBoundsError", "wild %s of %zu bytes, far from every buffer, by %s at " PC_FORMAT, verb, size,
         here().c_str(), pc);
  }
  fail("OutOfBoundsError", "%s: %s of %zu bytes at offset %ld, but it has %zu bytes, by %s at " PC_FORMAT,
       name(slot).c_str(), verb, size, offset, slot.size, here().c_str(), pc);
}

// Whether a GPU may perform both accesses at the same time, because nothing orders them.
bool is_concurrent(const Access& past, const Access& now, Space space) {
  if (past.epoch == 0) return false;
  if (past.epoch < first_epoch[space]) {  // another threadgroup
    const auto is_before = [&](size_t number) {
      const Published& other = published[number];
      return past.epoch >= other.first_epoch[space] && past.epoch <= other.clock.before[space][past.simdgroup];
    };
    const auto& own = acquired[now.simdgroup];
    return space == kDevice && std::none_of(own.begin(), own.end(), is_before);
  }
  if (past.simdgroup != now.simdgroup) return past.epoch > known[now.simdgroup].before[space][past.simdgroup];
  return past.epoch == now.epoch && past.sequence == now.sequence && (past.lanes & ~now.lanes);
}

// Whether the history can forget `past`. It can if every later write that races with `past` also races with `now`.
bool continues(const Access& past, const Access& now, Space space) {
  return past.simdgroup == now.simdgroup && past.epoch >= first_epoch[space];
}

void remember_read(Cell& cell, const Access& now, Space space) {
  Access* reads = cell.reads;
  if (!continues(reads[0], now, space)) {
    if (continues(reads[1], now, space)) {
      const Access other = reads[0];
      reads[0] = reads[1];
      reads[1] = other;
    } else {
      const bool is_earlier = reads[0].epoch && reads[0].epoch < first_epoch[space];
      (is_earlier ? cell.earlier_read : reads[1]) = reads[0];
      reads[0] = now;
      return;
    }
  }
  if (reads[0].epoch == now.epoch && reads[0].sequence == now.sequence) {
    reads[0].lanes |= now.lanes;
  } else {
    reads[0] = now;
  }
}

// Splits each cell into two cells of half the bytes. Both get the history of the cell.
void refine(Slot& slot) {
  const size_t count = cell_count(slot);
  slot.cell_bits--;
  Cell* finer = static_cast<Cell*>(map(cell_count(slot) * sizeof(Cell), PROT_READ | PROT_WRITE));
  for (size_t i = 0; i < cell_count(slot); i++) {
    if (i / 2 < count && (slot.cells[i / 2].write.epoch || slot.cells[i / 2].reads[0].epoch)) {
      finer[i] = slot.cells[i / 2];
    }
  }
  munmap(slot.cells, count * sizeof(Cell));
  slot.cells = finer;
}

}  // namespace

void reserve_arena() {
  arena = static_cast<char*>(map(kArenaSize, PROT_NONE));
}

Slot& allocate(int number, size_t size, Space space, const char* name, int index) {
  if (size > kMaxBytes)
    fail("LimitError", "'%s' has %zu bytes, more than the %zu there is room for", name, size, kMaxBytes);
  Slot& slot = slots[number];
  slot = Slot{};
  slot.begin = arena + number * kSlotSize + kSlotSize / 4;  // guards on both sides
  slot.size = size;
  slot.space = space;
  slot.is_bound = true;
  slot.index = index;
  slot.name = name;
  if (mprotect(slot.begin, (size + kPage - 1) / kPage * kPage, PROT_READ | PROT_WRITE)) {
    fail("MetalError", "cannot allocate %zu bytes for '%s'", size, name);
  }
  return slot;
}

void track(Slot& slot) {
  slot.cell_bits = 2;
  slot.cells = static_cast<Cell*>(map(cell_count(slot) * sizeof(Cell), PROT_READ | PROT_WRITE));
}

size_t count_unwritten(const Slot& slot, size_t element_size) {
  if (!slot.cells) return slot.size / element_size;
  size_t count = 0;
  for (size_t element = 0; element < slot.size / element_size; element++) {
    bool is_written = true;
    for (size_t byte = element * element_size; byte < (element + 1) * element_size; byte++) {
      is_written &= slot.cells[byte >> slot.cell_bits].write.epoch != 0;
    }
    count += !is_written;
  }
  return count;
}

void begin_threadgroup() {
  for (int space = 0; space < kSpaces; space++) {
    begin_epoch(space);
    first_epoch[space] = last_epoch[space];
  }
  for (auto& own : acquired) own.clear();
}

void pass_barrier(int fence) {
  if (fence & kFenceDevice) {
    begin_epoch(kDevice);
    for (const auto& own : acquired) acquired[0].insert(own.begin(), own.end());
    for (auto& own : acquired) own = acquired[0];
  }
  if (fence & kFenceThreadgroup) begin_epoch(kThreadgroup);
}

void release(Clock& clock) {
  const uint32_t own = simdgroup();
  join(clock, known[own]);
  for (int space = 0; space < kSpaces; space++) {
    clock.before[space][own] = epoch[space][own];
    epoch[space][own] = ++last_epoch[space];
  }
}

void acquire(const Clock& clock) {
  join(known[simdgroup()], clock);
}

void meet_threadgroups(const void* address, size_t size, bool is_published, const void* return_address) {
  const Slot& slot = slots[static_cast<size_t>(static_cast<const char*>(address) - arena) >> kSlotBits];
  const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - slot.begin);
  if (slot.is_read_only || offset + size > slot.size) {
    out_of_bounds(slot, static_cast<long>(offset), size, true, code_address(return_address));
  }
  for (size_t i = 0; i < published.size(); i++) {
    if (published[i].address == address) acquired[simdgroup()].insert(i);
  }
  if (!is_published) return;
  published.push_back({address, {}, known[simdgroup()]});
  for (int space = 0; space < kSpaces; space++) {
    published.back().first_epoch[space] = first_epoch[space];
    published.back().clock.before[space][simdgroup()] = epoch[space][simdgroup()];
  }
}

namespace {
void set_written(void* address, size_t size, uint32_t lanes) {
  Slot& slot = slots[static_cast<size_t>(static_cast<char*>(address) - arena) >> kSlotBits];
  const size_t offset = static_cast<size_t>(static_cast<char*>(address) - slot.begin);
  for (size_t i = offset >> slot.cell_bits; i <= (offset + size - 1) >> slot.cell_bits; i++) {
    slot.cells[i].write.lanes = lanes;
  }
}
}  // namespace

void begin_write(void* address, size_t size, const void* return_address) {
  access_memory(address, size, true, return_address);
  set_written(address, size, 0);
  memset(address, 0xff, size);
}

void end_write(void* address, size_t size) {
  set_written(address, size, ~0u);
}

void check_alignment(const void* address, size_t alignment, const void* return_address) {
  if (!current_thread || reinterpret_cast<size_t>(address) % alignment == 0) return;
  fail("MetalError", "misaligned access at %p, by %s at " PC_FORMAT, address, here().c_str(),
       code_address(return_address));
}

void access_memory(const void* pointer, size_t size, bool is_write, const void* return_address) {
  if (!current_thread) return;
  const char* const address = static_cast<const char*>(pointer);
  const size_t place = static_cast<size_t>(address - arena);
  if (place >= kArenaSize) {
    if (is_private(address) || (address >= &__executable_start && address < &_end)) return;
    fail("OutOfBoundsError", "wild %s of %zu bytes at %p, in no buffer, by %s at " PC_FORMAT,
         is_write ? "write" : "read", size, address, here().c_str(), code_address(return_address));
  }
  Slot& slot = slots[place >> kSlotBits];
  const size_t offset = static_cast<size_t>(address - slot.begin);
  if (!slot.is_bound || offset >= slot.size || size > slot.size - offset) {
    out_of_bounds(slot, static_cast<long>(offset), size, is_write, code_address(return_address));
  }
  counters.bytes[slot.space][is_write] += size;
  if (slot.is_read_only) {
    if (!is_write) return;
    fail("OutOfBoundsError", "%s is constant, but written at offset %zu by %s at " PC_FORMAT, name(slot).c_str(),
         offset, here().c_str(), code_address(return_address));
  }
  while ((offset | size) & ((size_t{1} << slot.cell_bits) - 1)) refine(slot);

  const Access now{epoch[slot.space][simdgroup()], current_thread->sequence, 1u << current_thread->index % kLanes,
                   static_cast<uint32_t>(code_address(return_address)), simdgroup()};
  for (size_t i = offset >> slot.cell_bits; i <= (offset + size - 1) >> slot.cell_bits; i++) {
    Cell& cell = slot.cells[i];
    const auto check = [&](const Access& past, bool past_is_write) {
      if (is_concurrent(past, now, slot.space)) race(slot, i << slot.cell_bits, past, past_is_write, now, is_write);
    };
    check(cell.write, true);
    if (is_write) {
      check(cell.reads[0], false);
      check(cell.reads[1], false);
      check(cell.earlier_read, false);
      cell.write = now;
    } else {
      const bool is_written = slot.space == kThreadgroup
                                  ? cell.write.epoch >= first_epoch[kThreadgroup] && cell.write.lanes
                                  : cell.write.epoch != 0;
      if (!is_written && (slot.space == kThreadgroup || slot.is_undefined)) {
        fail("UninitialisedError", "%s: offset %zu of %zu is read by %s before anything wrote it, at " PC_FORMAT,
             name(slot).c_str(), i << slot.cell_bits, slot.size, here().c_str(), code_address(return_address));
      }
      remember_read(cell, now, slot.space);
    }
  }
}
