// The backward pass's interface; the forward pass's is forward.h.
#pragma once

#include "forward.h"

namespace flashattn::cpu {

struct BackwardArgs {
  AttentionArgs forward;  // arguments of the forward pass, with the outputs that it wrote
  bool decoded;           // whether decode() ran the forward pass, not prefill()

  const void* out_gradient;   // of out's dtype
  const float* lse_gradient;  // null: zero
  Strides out_gradient_strides, lse_gradient_strides;

  // In query's dtype; row-major, in the shapes of query, key and value.
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  // Row-major (*B, H_q, L): the sum over columns of out * out_gradient, minus lse_gradient. The gradient of sinks is
  // computed from delta and row_stats.
  float* delta;
};

// Writes the gradients of query, key and value, and delta. It recomputes probabilities from row_stats, so it needs no
// memory of size L * S. A cancelled call leaves NaN in everything that it writes.
void backward(const BackwardArgs& args);

}  // namespace flashattn::cpu
