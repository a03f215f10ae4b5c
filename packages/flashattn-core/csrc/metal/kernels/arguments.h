// Macros that declare the arguments of kernels: a call's arrays and structs. buffer_of() in launch.h gives each
// argument its buffer index. source_text() writes the indices and the function constants into the text before this
// file.
#pragma once

#include "call/params.h"
#include "dialect.h"
#include "elements.h"

// Begins a kernel's declaration. SIMDGROUPS: how many SIMD groups a threadgroup has.
#define FLASHATTN_KERNEL(SIMDGROUPS) [[kernel, max_total_threads_per_threadgroup((SIMDGROUPS) * FLASHATTN_LANES)]] void

#define FLASHATTN_BOUND(name) [[buffer(FLASHATTN_BUFFER_##name)]]
#define FLASHATTN_READ(T, name) const device T* name FLASHATTN_BOUND(name)
#define FLASHATTN_WRITTEN(T, name) device T* name FLASHATTN_BOUND(name)
#define FLASHATTN_VALUE(T, name) const constant T& name FLASHATTN_BOUND(name)

// Declares an optional input. The comma comes first, because the lists in inputs.def have no separators.
#define FLASHATTN_OPTIONAL(name, called, dtype, axes) \
  , const device FLASHATTN_ELEMENT_##dtype* name [[buffer(FLASHATTN_BUFFER_##name), function_constant(has_##name)]]

// K: the type of keys and values. For quantised keys and values it is uint, the type of the packed words.
#define FLASHATTN_INPUT_ARGUMENTS(T, K)                                                       \
  FLASHATTN_VALUE(AttentionParams, params), FLASHATTN_READ(T, query), FLASHATTN_READ(K, key), \
      FLASHATTN_READ(K, value) FLASHATTN_MASKS(FLASHATTN_OPTIONAL) FLASHATTN_GROUPS(FLASHATTN_OPTIONAL)

// Declares the outputs and the input `sinks`. A kernel reads `sinks` when it writes a row of the output.
#define FLASHATTN_OUTPUT_ARGUMENTS(T)                                                            \
  FLASHATTN_WRITTEN(T, out), FLASHATTN_WRITTEN(float, lse), FLASHATTN_WRITTEN(float, row_stats), \
      device float* exact_out                                                                    \
      [[buffer(FLASHATTN_BUFFER_exact_out), function_constant(has_exact_out)]] FLASHATTN_SINKS(FLASHATTN_OPTIONAL)

// These arguments tell which thread this is. Every kernel has them.
#define FLASHATTN_POSITION                                                                        \
  uint3 group [[threadgroup_position_in_grid]], uint3 grid [[threadgroups_per_grid]],             \
      uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]], \
      uint thread_index [[thread_index_in_threadgroup]]

// The inputs that backward_dq and backward_dkv have in addition to FLASHATTN_INPUT_ARGUMENTS. delta is contiguous and
// has the shape (*B, H_q, L).
#define FLASHATTN_BACKWARD_ARGUMENTS(T)                                                                 \
  FLASHATTN_VALUE(BackwardParams, backward), FLASHATTN_READ(float, row_stats), FLASHATTN_READ(T, dout), \
      FLASHATTN_READ(float, delta)
