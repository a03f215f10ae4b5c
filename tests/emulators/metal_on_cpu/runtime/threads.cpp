// Switches between fibers, which wait for each other at barriers and in operations of a SIMD group.
#include "threads.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "counters.h"
#include "failure.h"
#include "memory.h"

namespace {

constexpr size_t kStackSize = 256 << 10;
constexpr size_t kGuardSize = 16 << 10;  // bytes that may not be accessed, at the lower end of each stack

std::vector<Thread> threads;
char* stacks;
void* scheduler_stack_pointer;
const MslKernel* kernel;

struct Variable {
  int slot;
  bool is_declared;  // whether the current threadgroup has reached the declaration
};
std::map<const void*, Variable> variables;

extern "C" void msl_switch_stack(void** save, void* load);
// Saves the stack pointer and the registers that a called function must preserve. Continues on the stack `load`.
asm(R"(
.text
.globl msl_switch_stack
msl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

void resume(Thread& thread) {
  current_thread = &thread;
  msl_switch_stack(&scheduler_stack_pointer, thread.stack_pointer);
  current_thread = nullptr;
}

void pause() {
  msl_switch_stack(&current_thread->stack_pointer, scheduler_stack_pointer);
}

void thread_main() {
  kernel->entry(&current_thread->arguments);
  current_thread->state = State::kReturned;
  pause();
  __builtin_unreachable();
}

void prepare_stack(Thread& thread) {
  void** top = reinterpret_cast<void**>(thread.stack + kStackSize - 64);
  *--top = nullptr;  // return address of thread_main: unused, but keeps the stack aligned
  *--top = reinterpret_cast<void*>(thread_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers that msl_switch_stack pops
  thread.stack_pointer = top;
}

bool is_same_place(const Thread& a, const Thread& b) {
  if (a.state != b.state) return false;
  if (a.state == State::kReturned) return true;
  if (a.state == State::kWaiting) return false;
  if (a.state == State::kAtOperation && a.operation != b.operation) return false;
  return a.line == b.line && !strcmp(a.file, b.file);
}

[[noreturn]] void divergence(const char* what, const Thread& a, const Thread& b) {
  fail("DivergenceError", "%s:\n  %s\n  %s", what, describe(a).c_str(), describe(b).c_str());
}

// Performs a SIMD group's operation if all its lanes have arrived.
void complete_operation(Thread* lanes) {
  int waiting = 0;
  for (int i = 0; i < kLanes; i++) waiting += lanes[i].state == State::kAtOperation;
  if (waiting == 0) return;
  for (int i = 0; i < kLanes; i++) {
    if (lanes[i].state == State::kReady || lanes[i].state == State::kWaiting) return;  // this lane may still arrive
  }
  const Thread* first = lanes;
  while (first->state != State::kAtOperation) first++;
  for (int i = 0; i < kLanes; i++) {
    if (!is_same_place(lanes[i], *first)) {
      divergence("the lanes of a SIMD group do not meet at one operation", *first, lanes[i]);
    }
  }
  MslLane values[kLanes];
  for (int i = 0; i < kLanes; i++) values[i] = lanes[i].lane;
  if (first->operation->exchange) first->operation->exchange(values);
  counters.operations[first->operation->counter]++;
  for (int i = 0; i < kLanes; i++) {
    lanes[i].state = State::kReady;
    lanes[i].sequence++;
  }
}

// Runs each ready thread until it waits or returns. With kGreedy, only the threads of one SIMD group run. Returns false
// if no thread was ready.
bool run_ready(std::vector<int>& order, Schedule& schedule) {
  const int count = static_cast<int>(threads.size());
  bool has_run = false;
  if (schedule.kind == Schedule::kGreedy) {
    for (int begin = 0; begin < count && !has_run; begin += kLanes) {
      for (int i = begin; i < begin + kLanes; i++) {
        if (threads[i].state != State::kReady) continue;
        resume(threads[i]);
        has_run = true;
      }
    }
    return has_run;
  }
  if (schedule.kind == Schedule::kRandom) {
    for (int i = count - 1; i > 0; i--) std::swap(order[i], order[schedule.random(i + 1)]);
  }
  for (int i : order) {
    if (threads[i].state != State::kReady) continue;
    resume(threads[i]);
    has_run = true;
  }
  return has_run;
}

void poison_threadgroup_memory() {
  for (int i = kVariableSlots; i < kSlots; i++) {
    if (slots[i].is_bound) memset(slots[i].begin, 0xff, slots[i].size);
  }
  for (auto& [key, variable] : variables) variable.is_declared = false;
}

}  // namespace

uint64_t Schedule::random(uint64_t bound) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (random_state >> 33) % bound;
}

void create_threads(int count) {
  threads.resize(count);
  stacks = static_cast<char*>(
      mmap(nullptr, count * kStackSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) fail("MetalError", "no memory for the stacks of %d threads", count);
  for (int i = 0; i < count; i++) {
    threads[i].index = i;
    threads[i].stack = stacks + i * kStackSize;
    mprotect(threads[i].stack, kGuardSize, PROT_NONE);
  }
}

bool is_stack_guard(const void* address, int* thread) {
  const size_t offset = static_cast<size_t>(static_cast<const char*>(address) - stacks);
  *thread = static_cast<int>(offset / kStackSize);
  return offset < threads.size() * kStackSize && offset % kStackSize < kGuardSize;
}

bool is_private(const void* address) {
  const auto is_in = [address](const void* begin, size_t size) {
    return static_cast<size_t>(static_cast<const char*>(address) - static_cast<const char*>(begin)) < size;
  };
  return is_in(current_thread->stack, kStackSize) || is_in(current_thread, sizeof(Thread));
}

std::string describe(const Thread& thread) {
  std::string text = "thread " + std::to_string(thread.index) + " (simdgroup " + std::to_string(thread.index / kLanes) +
                     ", lane " + std::to_string(thread.index % kLanes) + ")";
  const std::string place = " at " + std::string(thread.file ? thread.file : "") + ":" + std::to_string(thread.line);
  if (thread.state == State::kReturned) return text + " has returned";
  if (thread.state == State::kAtBarrier) return text + " waits in threadgroup_barrier" + place;
  if (thread.state == State::kWaiting) return text + " waits in " + thread.waits_in + place;
  if (thread.state == State::kAtOperation) return text + " waits in " + thread.operation->name + place;
  return text;
}

void run_threadgroup(const MslKernel& entry, const unsigned position[3], const unsigned grid[3], const unsigned size[3],
                     void* const* buffers, Schedule& schedule) {
  const unsigned count = static_cast<unsigned>(threads.size());
  kernel = &entry;
  threadgroup_number++;
  memcpy(current_threadgroup, position, sizeof current_threadgroup);
  begin_threadgroup();
  poison_threadgroup_memory();
  std::vector<int> order(count);
  for (unsigned i = 0; i < count; i++) {
    Thread& thread = threads[i];
    thread.state = State::kReady;
    thread.sequence = 0;
    thread.arguments = {buffers, {}};
    const unsigned local[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
    const auto set = [&](MslBuiltin builtin, unsigned x, unsigned y = 0, unsigned z = 0) {
      const unsigned values[3] = {x, y, z};
      memcpy(thread.arguments.values[builtin], values, sizeof values);
    };
    set(threadgroup_position_in_grid, position[0], position[1], position[2]);
    set(threadgroups_per_grid, grid[0], grid[1], grid[2]);
    set(thread_position_in_threadgroup, local[0], local[1], local[2]);
    set(threads_per_threadgroup, size[0], size[1], size[2]);
    set(thread_index_in_threadgroup, i);
    set(thread_index_in_simdgroup, i % kLanes);
    set(simdgroup_index_in_threadgroup, i / kLanes);
    set(simdgroups_per_threadgroup, count / kLanes);
    prepare_stack(thread);
    order[i] = static_cast<int>(schedule.kind == Schedule::kReverse ? count - 1 - i : i);
  }

  while (true) {
    if (run_ready(order, schedule)) {
      for (unsigned i = 0; i < count; i += kLanes) complete_operation(&threads[i]);
      for (Thread& thread : threads) {
        if (thread.state == State::kWaiting && thread.is_over(thread.subject)) thread.state = State::kReady;
      }
      continue;
    }
    for (const Thread& thread : threads) {
      if (!is_same_place(thread, threads[0])) {
        divergence("the threads of a threadgroup do not meet at one barrier", threads[0], thread);
      }
    }
    if (threads[0].state == State::kReturned) return;
    counters.threadgroup_barriers++;
    pass_barrier(threads[0].fence);
    bool condition = true;
    for (const Thread& thread : threads) condition &= thread.condition;
    for (Thread& thread : threads) {
      thread.state = State::kReady;
      thread.condition = condition;
    }
  }
}

extern "C" {
void msl_simdgroup_operation(const MslOperation* operation, const void* input, void* output, long argument,
                             const char* file, int line) {
  Thread& thread = *current_thread;
  thread.state = State::kAtOperation;
  thread.operation = operation;
  thread.lane = {input, output, argument};
  thread.file = file;
  thread.line = line;
  pause();
}

bool msl_threadgroup_barrier(int fence, bool condition, const char* file, int line) {
  Thread& thread = *current_thread;
  thread.state = State::kAtBarrier;
  thread.fence = fence;
  thread.condition = condition;
  thread.file = file;
  thread.line = line;
  pause();
  return thread.condition;
}

void msl_wait(bool (*condition)(const void*), const void* subject, const char* name, const char* file, int line) {
  if (condition(subject)) return;
  Thread& thread = *current_thread;
  thread.state = State::kWaiting;
  thread.is_over = condition;
  thread.subject = subject;
  thread.waits_in = name;
  thread.file = file;
  thread.line = line;
  pause();
}

const MslThread* msl_this_thread() {
  return &current_thread->arguments;
}

// Allocates a threadgroup variable when the first thread reaches its declaration.
void* msl_threadgroup_variable(const void* key, unsigned long size, const char* name) {
  const auto [found, is_new] = variables.try_emplace(key, Variable{});
  Variable& variable = found->second;
  if (is_new) {
    variable.slot = kVariableSlots + static_cast<int>(variables.size()) - 1;
    if (variable.slot >= kSlots) fail("LimitError", "more threadgroup variables than the harness has room for");
    Slot& slot = allocate(variable.slot, size, kThreadgroup, name, -1);
    track(slot);
    memset(slot.begin, 0xff, size);
  }
  if (!variable.is_declared) {
    variable.is_declared = true;
    size_t total = 0;
    for (const auto& [other_key, other] : variables) {
      if (other.is_declared) total += slots[other.slot].size;
    }
    if (total > kernel->threadgroup_memory) {
      fail("LimitError", "threadgroup memory: %zu bytes with '%s', but there are %lu", total, name,
           kernel->threadgroup_memory);
    }
  }
  return slots[variable.slot].begin;
}
}
