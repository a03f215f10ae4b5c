// The arrays that the backward pass reads and writes besides the forward pass's inputs.
#pragma once

#include <vector>

#include "../request/strides.h"

namespace flashattn {

struct GradientInputs {
  Outputs saved;                  // the forward pass's outputs
  const mx::array& out_gradient;  // the cotangent of out
  const mx::array* lse_gradient;  // the cotangent of lse; null: zeros
};

// The gradients of query, key and value; and delta, see cpu/backward.h.
struct Gradients {
  mx::array &query, &key, &value, &delta;
};

}  // namespace flashattn
