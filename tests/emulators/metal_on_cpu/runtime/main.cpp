// Runs one kernel. argv[1] is a folder with the files `job` (text, see read_job) and `inputs` (the buffers' bytes). The
// program writes the file `results` there.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "abi.h"
#include "counters.h"
#include "failure.h"
#include "memory.h"
#include "threads.h"

unsigned long msl_transcendentals;

namespace {

std::map<std::string, const MslKernel*>& kernels() {
  static std::map<std::string, const MslKernel*> map;  // in a function, because kernels register before main
  return map;
}

struct Buffer {
  bool is_given = false;
  bool is_output, is_undefined;
  size_t size, offset, element_size;
};

struct Job {
  std::string kernel, folder;
  unsigned grid[3], threadgroup[3];
  Schedule schedule;
  Buffer buffers[kMaxBuffers];
};

// A job is the kernel's name, the grid, the threadgroup, the schedule, and a line for each buffer; see program.py.
Job read_job(const std::string& folder) {
  Job job;
  job.folder = folder;
  FILE* file = fopen((folder + "/job").c_str(), "r");
  if (!file) fail("MetalError", "no job in %s", folder.c_str());
  char kernel[512];
  unsigned *grid = job.grid, *group = job.threadgroup;
  int schedule, index, is_output, is_undefined;
  if (fscanf(file, "%511s %u %u %u %u %u %u %d %lu", kernel, &grid[0], &grid[1], &grid[2], &group[0], &group[1],
             &group[2], &schedule, &job.schedule.random_state) != 9) {
    fail("MetalError", "cannot read the job");
  }
  job.kernel = kernel;
  job.schedule.kind = static_cast<Schedule::Kind>(schedule);
  for (Buffer buffer; fscanf(file, "%d %zu %zu %zu %d %d", &index, &buffer.size, &buffer.offset, &buffer.element_size,
                             &is_output, &is_undefined) == 6;) {
    buffer.is_given = true;
    buffer.is_output = is_output;
    buffer.is_undefined = is_undefined;
    job.buffers[index] = buffer;
  }
  fclose(file);
  return job;
}

void allocate_buffers(const Job& job, const MslKernel& kernel) {
  FILE* inputs = fopen((job.folder + "/inputs").c_str(), "rb");
  if (!inputs) fail("MetalError", "no inputs");
  for (int i = 0; i < kMaxBuffers; i++) {
    const Buffer& buffer = job.buffers[i];
    if (!buffer.is_given) continue;
    const MslBinding* binding = nullptr;
    for (int k = 0; k < kernel.binding_count; k++) {
      const MslBinding& candidate = kernel.bindings[k];
      if (candidate.is_wanted && candidate.index == i) binding = &candidate;
    }
    if (!binding) fail("BindingError", "unused buffer %d: kernel '%s' has no such argument", i, kernel.name);
    const Space space = binding->is_constant ? kConstant : kDevice;
    Slot& slot = allocate(kBufferSlots + i, buffer.size, space, binding->name, i);
    slot.is_read_only = binding->is_constant || binding->is_const;
    slot.is_undefined = buffer.is_undefined;
    if (slot.is_undefined) {
      memset(slot.begin, 0xff, slot.size);
    } else if (fread(slot.begin, 1, slot.size, inputs) != slot.size) {
      fail("MetalError", "short inputs");
    }
    if (slot.is_undefined) slot.is_read_only = false;
    if (!slot.is_read_only) track(slot);
    if (binding->is_reference && buffer.size - buffer.offset < binding->element_size) {
      fail("BindingError", "buffer %d (%s) has %zu bytes, but the argument %lu", i, binding->name,
           buffer.size - buffer.offset, binding->element_size);
    }
  }
  fclose(inputs);
}

// Fails if an argument of the kernel has no buffer, or if two arguments have the same buffer.
void check_bindings(const Job& job, const MslKernel& kernel) {
  for (int k = 0; k < kernel.binding_count; k++) {
    const MslBinding& binding = kernel.bindings[k];
    if (binding.index < 0 || binding.index >= kMaxBuffers) {
      fail("BindingError", "buffer %d (%s): indices end at %d", binding.index, binding.name, kMaxBuffers - 1);
    }
    for (int other = 0; other < k; other++) {
      const MslBinding& before = kernel.bindings[other];
      if (binding.is_wanted && before.is_wanted && before.index == binding.index) {
        fail("BindingError", "buffer %d is doubly bound: to '%s' and to '%s'", binding.index, before.name,
             binding.name);
      }
    }
    if (job.buffers[binding.index].is_given) continue;
    if (binding.is_wanted) fail("BindingError", "buffer %d (%s) is not bound", binding.index, binding.name);
    slots[kBufferSlots + binding.index].name = binding.name;  // for the error message if the kernel reads this buffer
    slots[kBufferSlots + binding.index].index = binding.index;
  }
}

// Writes "done", a line for each count, an empty line and the outputs' bytes.
void write_results(const Job& job) {
  FILE* results = fopen((job.folder + "/results").c_str(), "wb");
  if (!results) fail("MetalError", "cannot write the results");
  const auto write = [&](const std::string& name, unsigned long count) {
    fprintf(results, "%s %lu\n", name.c_str(), count);
  };
  fprintf(results, "done\n");
  write("mma", counters.operations[kCountMma]);
  write("device_read", counters.bytes[kDevice][0]);
  write("device_written", counters.bytes[kDevice][1]);
  write("threadgroup_read", counters.bytes[kThreadgroup][0]);
  write("threadgroup_written", counters.bytes[kThreadgroup][1]);
  write("barriers", counters.threadgroup_barriers);
  write("shuffles", counters.operations[kCountShuffle]);
  write("reductions", counters.operations[kCountReduction]);
  write("transcendentals", msl_transcendentals);
  std::vector<const Slot*> outputs;
  for (int i = 0; i < kMaxBuffers; i++) {
    if (!job.buffers[i].is_given || !job.buffers[i].is_output) continue;
    outputs.push_back(&slots[kBufferSlots + i]);
    write("unwritten." + std::to_string(i), count_unwritten(*outputs.back(), job.buffers[i].element_size));
  }
  fprintf(results, "\n");
  for (const Slot* slot : outputs) fwrite(slot->begin, 1, slot->size, results);
  fclose(results);
}

void on_fault(int, siginfo_t* info, void*) {
  int thread;
  if (is_stack_guard(info->si_addr, &thread)) {
    fail("MetalError", "stack overflow of thread %d: its private arrays are too large, or it recurses", thread);
  }
  fail("MetalError", "the kernel crashed at address %p, in %s", info->si_addr,
       current_thread ? describe(*current_thread).c_str() : "no thread");
}

void catch_faults() {
  static char stack[64 << 10];  // for the handler, because the stack of the thread may be full
  stack_t alternative = {};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

void run(Job& job, const MslKernel& kernel) {
  static void* buffers[kMaxBuffers];  // static, because access_memory() lets kernels access globals
  for (int i = 0; i < kMaxBuffers; i++) {
    buffers[i] =
        arena + (kBufferSlots + i) * kSlotSize + kSlotSize / 4 + job.buffers[i].offset * job.buffers[i].is_given;
  }
  const unsigned* grid = job.grid;
  std::vector<unsigned> order(grid[0] * grid[1] * grid[2]);
  std::iota(order.begin(), order.end(), 0u);
  if (job.schedule.kind == Schedule::kReverse) std::vector(order.rbegin(), order.rend()).swap(order);
  if (job.schedule.kind == Schedule::kRandom) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[job.schedule.random(i)]);
  }
  for (unsigned number : order) {
    const unsigned position[3] = {number % grid[0], number / grid[0] % grid[1], number / (grid[0] * grid[1])};
    run_threadgroup(kernel, position, grid, job.threadgroup, buffers, job.schedule);
  }
}

}  // namespace

extern "C" {
void msl_register(const MslKernel* kernel) {
  kernels()[kernel->name] = kernel;
}

// METAL_CONSTANTS is ";index=value;index=value;". It is an environment variable because function constants get their
// values before main, while the program's globals are initialised.
void msl_constant(int index, void* value, unsigned long size) {
  const char* text = getenv("METAL_CONSTANTS");
  const std::string key = ";" + std::to_string(index) + "=";
  const char* found = text ? strstr(text, key.c_str()) : nullptr;
  if (!found) return;
  const long number = strtol(found + key.size(), nullptr, 10);
  memcpy(value, &number, size);
}
}

int main(int count, char** arguments) {
  if (count != 2) fail("MetalError", "usage: %s FOLDER", arguments[0]);
  catch_faults();
  Job job = read_job(arguments[1]);
  const auto found = kernels().find(job.kernel);
  if (found == kernels().end()) fail("BindingError", "no kernel '%s'", job.kernel.c_str());
  const unsigned threads = job.threadgroup[0] * job.threadgroup[1] * job.threadgroup[2];
  if (threads > 1024) fail("LimitError", "%u threads in a threadgroup, but there are at most 1024", threads);
  if (threads == 0 || threads % kLanes) {
    fail("LimitError", "%u threads in a threadgroup: not a multiple of the 32 of a SIMD group", threads);
  }
  reserve_arena();
  check_bindings(job, *found->second);
  allocate_buffers(job, *found->second);
  create_threads(static_cast<int>(threads));
  run(job, *found->second);
  write_results(job);
  return 0;
}
