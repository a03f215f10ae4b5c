// The CPU backend's interface. Its functions take raw pointers, shapes and strides, and write finished outputs. The
// backend does not depend on MLX, so it can be built and sanitised alone.
#pragma once

#include <string>

#include "../call/call.h"

namespace flashattn::cpu {

// The pointer types for the dtypes in inputs.def. A Dtype in Call gives the element type of a void pointer.
#define FLASHATTN_CPU_tensor const void*
#define FLASHATTN_CPU_groups const void*
#define FLASHATTN_CPU_int32 const int32_t*
#define FLASHATTN_CPU_uint32 const uint32_t*
#define FLASHATTN_CPU_boolean const bool*
#define FLASHATTN_CPU_bytes const uint8_t*
#define FLASHATTN_CPU_additive const void*
#define FLASHATTN_CPU_logits const float*
#define FLASHATTN_CPU_slopes const float*
#define FLASHATTN_CPU_POINTER(name, called, dtype, axes) FLASHATTN_CPU_##dtype name = nullptr;

// A call and its arrays.
struct AttentionArgs : Call {
  FLASHATTN_INPUTS(FLASHATTN_CPU_POINTER)  // null for absent inputs
  void* out = nullptr;
  float* exact_out = nullptr;  // out before it is rounded, with out's strides; null if no gradient needs it
  float* lse = nullptr;
  float* row_stats = nullptr;  // row_max and row_sum, sinks included, for backward()
};

#undef FLASHATTN_CPU_POINTER

// prefill() and decode() compute the same function: prefill() splits the work over queries, decode() over keys. Several
// threads may call them at the same time. Without memory for their work they throw std::bad_alloc.
void prefill(const AttentionArgs& args);
void decode(const AttentionArgs& args);

// Reads FLASHATTN_CPU_ISA and FLASHATTN_NUM_THREADS, once. If this machine cannot do what a variable asks for, throws
// std::invalid_argument, which names the variable.
void initialise();

// Returns the instruction set and the number of threads, as in "AVX2, 2 threads". Initialises the backend.
std::string describe();

}  // namespace flashattn::cpu
