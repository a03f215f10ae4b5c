// Macros for the arguments of kernels: a call's arrays and structs, at the indices that buffer_of() of launch.h gives
// them. source_text() defines these indices, and the function constants, before this text.
#pragma once

#include "call/params.h"
#include "dialect.h"
#include "elements.h"

// Precedes a kernel. SIMDGROUPS: how many a threadgroup has.
#define FLASHATTN_KERNEL(SIMDGROUPS) [[kernel, max_total_threads_per_threadgroup((SIMDGROUPS) * FLASHATTN_LANES)]] void

#define FLASHATTN_BOUND(name) [[buffer(FLASHATTN_BUFFER_##name)]]
#define FLASHATTN_READ(T, name) const device T* name FLASHATTN_BOUND(name)
#define FLASHATTN_WRITTEN(T, name) device T* name FLASHATTN_BOUND(name)
#define FLASHATTN_VALUE(T, name) const constant T& name FLASHATTN_BOUND(name)

// An optional input. The comma comes first, because lists of inputs.def expand to a series of such arguments.
#define FLASHATTN_OPTIONAL(name, called, dtype, axes) \
  , const device FLASHATTN_ELEMENT_##dtype* name [[buffer(FLASHATTN_BUFFER_##name), function_constant(has_##name)]]

// K: the type of keys and values, or uint for quantised words.
#define FLASHATTN_INPUT_ARGUMENTS(T, K)                                                       \
  FLASHATTN_VALUE(AttentionParams, params), FLASHATTN_READ(T, query), FLASHATTN_READ(K, key), \
      FLASHATTN_READ(K, value) FLASHATTN_MASKS(FLASHATTN_OPTIONAL) FLASHATTN_GROUPS(FLASHATTN_OPTIONAL)

// The outputs, and the sinks, which a kernel reads when it finishes a row.
#define FLASHATTN_OUTPUT_ARGUMENTS(T)                       \
  FLASHATTN_WRITTEN(T, out), FLASHATTN_WRITTEN(float, lse), \
      FLASHATTN_WRITTEN(float, row_stats) FLASHATTN_SINKS(FLASHATTN_OPTIONAL)

// Which thread this is. Every kernel has these arguments.
#define FLASHATTN_POSITION                                                                        \
  uint3 group [[threadgroup_position_in_grid]], uint3 grid [[threadgroups_per_grid]],             \
      uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]], \
      uint thread_index [[thread_index_in_threadgroup]]

// Further inputs of backward_dq and backward_dkv. delta: (*B, H_q, L), contiguous.
#define FLASHATTN_BACKWARD_ARGUMENTS(T)                                                                 \
  FLASHATTN_VALUE(BackwardParams, backward), FLASHATTN_READ(float, row_stats), FLASHATTN_READ(T, dout), \
      FLASHATTN_READ(float, delta)
