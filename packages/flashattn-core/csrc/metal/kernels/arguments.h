// The arguments of the kernels: the arrays and structs of one call, bound as in launch.h.
#pragma once

#include "call/params.h"
#include "dialect.h"
#include "variant.h"

#define FLASHATTN_PARAMS const constant AttentionParams& params [[buffer(5)]]

#define FLASHATTN_TENSORS(T, K) \
  const device T *query [[buffer(0)]], const device K *key [[buffer(1)]], const device K *value [[buffer(2)]]

// Bound only where key and value are quantised: words of those, then.
#define FLASHATTN_QUANTISED_INPUTS                                                      \
  const device uchar *key_scales [[buffer(26), function_constant(is_quantised)]],       \
      const device uchar *key_biases [[buffer(27), function_constant(is_quantised)]],   \
      const device uchar *value_scales [[buffer(28), function_constant(is_quantised)]], \
      const device uchar *value_biases [[buffer(29), function_constant(is_quantised)]], \
      const constant QuantParams *quant [[buffer(30), function_constant(is_quantised)]]

#define FLASHATTN_OUTPUTS(T) device T *out [[buffer(3)]], device float *lse [[buffer(4)]]

// Bound only where the call has them.
#define FLASHATTN_OPTIONAL_INPUTS                                                \
  const device int *key_start [[buffer(6), function_constant(has_key_start)]],   \
      const device int *key_stop [[buffer(7), function_constant(has_key_stop)]], \
      const device uint *tree [[buffer(8), function_constant(has_tree)]],        \
      const device bool *visible [[buffer(9), function_constant(has_visible)]],  \
      const device uchar *bias [[buffer(10), function_constant(has_bias)]],      \
      const device float *alibi_slopes [[buffer(12), function_constant(has_alibi)]]

#define FLASHATTN_SINKS const device float* sinks [[buffer(11), function_constant(has_sinks)]]

// The gradient's.
#define FLASHATTN_BACKWARD_PARAMS const constant BackwardParams& backward [[buffer(25)]]

// What both of its kernels read besides query, key and value. delta: of (*B, H_q, L), one after the other.
#define FLASHATTN_BACKWARD_INPUTS(T)                                                 \
  const device float *saved_lse [[buffer(18)]], const device T *dout [[buffer(19)]], \
      const device float *delta [[buffer(21)]], FLASHATTN_PARAMS, FLASHATTN_BACKWARD_PARAMS
