// The interface of the CPU backend's backward pass. The interface of the forward pass is forward.h.
#pragma once

#include "forward.h"

namespace flashattn::cpu {

struct BackwardArgs {
  AttentionArgs forward;   // arguments of the forward pass, with the outputs that it wrote
  bool decoded;            // true if decode() ran the forward pass, false if prefill() ran it
  const float* exact_out;  // the forward pass's exact_out, or its out if that is float32

  const void* out_gradient;  // of out's dtype
  const float* lse_gradient;
  Strides out_gradient_strides, lse_gradient_strides;

  // The three outputs are row-major. They have query's dtype, and the shapes of query, key and value.
  void* query_gradient;
  void* key_gradient;
  void* value_gradient;
  // Row-major (*B, H_q, L): the sum over columns of exact_out * out_gradient, minus lse_gradient. The gradient of sinks
  // is computed from delta and row_stats. In a row where one key has nearly all of the weight, the gradient of a score
  // is the small difference of two large numbers, and delta is one of them. So out must not be rounded.
  float* delta;
};

// Writes delta, and the gradients of query, key and value. It recomputes probabilities from row_stats, so it needs no
// memory of size L * S. Without memory for its work it throws std::bad_alloc.
void backward(const BackwardArgs& args);

}  // namespace flashattn::cpu
