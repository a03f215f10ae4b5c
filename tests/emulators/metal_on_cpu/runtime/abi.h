// The interface between compiled kernels and the runtime. No includes: kernels are compiled without a C library.
#pragma once

constexpr int kLanes = 32;  // threads per SIMD group
constexpr int kMaxBuffers = 32;

// One lane's operands in an operation of its SIMD group.
struct MslLane {
  const void* input;
  void* output;
  long argument;
};

// An operation increases one of these counters.
enum MslCounter { kCountNothing, kCountShuffle, kCountReduction, kCountMma, kCounters };

// An operation in which all 32 lanes of a SIMD group meet. `exchange` runs once, when the last lane has arrived.
struct MslOperation {
  const char* name;
  int counter;
  void (*exchange)(MslLane* lanes);
};

// The built-in values of a kernel, in the order of MslThread::values.
enum MslBuiltin {
  threadgroup_position_in_grid,
  threadgroups_per_grid,
  thread_position_in_threadgroup,
  threads_per_threadgroup,
  thread_index_in_threadgroup,
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  simdgroups_per_threadgroup,
  kBuiltins
};

struct MslThread {
  void* const* buffers;
  unsigned values[kBuiltins][3];
};

// One pointer or reference among a kernel's arguments.
struct MslBinding {
  const char* name;
  bool is_constant;  // in the constant address space
  int index;
  bool is_const;
  bool is_reference;
  bool is_wanted;  // false if the argument's [[function_constant(...)]] is false
  unsigned long element_size;
};

struct MslKernel {
  const char* name;
  void (*entry)(const MslThread* thread);
  const MslBinding* bindings;
  int binding_count;
  unsigned long threadgroup_memory;  // bytes available to a threadgroup
};

enum MslFence { kFenceDevice = 1, kFenceThreadgroup = 2 };

extern "C" {
void msl_simdgroup_operation(const MslOperation* operation, const void* input, void* output, long argument,
                             const char* file, int line);
// Returns whether `condition` is true for all threads that meet at this barrier.
bool msl_threadgroup_barrier(int fence, bool condition, const char* file, int line);
// Waits until condition(subject) is true. `name` is the function in which the kernel waits, for error messages.
void msl_wait(bool (*condition)(const void* subject), const void* subject, const char* name, const char* file,
              int line);
const MslThread* msl_this_thread() __attribute__((const));
void* msl_threadgroup_variable(const void* key, unsigned long size, const char* name);
void msl_register(const MslKernel* kernel);
void msl_constant(int index, void* value, unsigned long size);
extern unsigned long msl_transcendentals;
}
