// The gradient's front door, as forward.h is that of the forward pass.
#pragma once

#include "forward.h"

namespace flashattn::cpu {

struct BackwardArgs {
  AttentionArgs forward;  // its outputs are those that the forward pass has left
  bool decoded;           // by decode(), and not by prefill()

  const void* out_gradient;   // of out's dtype
  const float* lse_gradient;  // null: zero
  Strides out_gradient_strides, lse_gradient_strides;

  // Of query's dtype; row-major, in the shapes of query, key and value.
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  // Row-major (*B, H_q, L): sum over the columns of out * out_gradient, less lse_gradient. The
  // gradient of sinks follows from it and lse.
  float* delta;
};

// Gradients of query, key and value, with probabilities recomputed from row_stats: no memory of size L * S. A cancelled
// call leaves NaN in all that it writes.
void backward(const BackwardArgs& args);

}  // namespace flashattn::cpu
