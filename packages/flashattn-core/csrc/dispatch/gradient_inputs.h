// What the gradient reads and writes beyond the forward pass's inputs.
#pragma once

#include <vector>

#include "../request/strides.h"

namespace flashattn {

struct GradientInputs {
  Outputs saved;                  // as the forward pass has left them
  const mx::array& out_gradient;  // what comes back for out
  const mx::array* lse_gradient;  // and for lse; null: zeros
};

// Of query, key and value; and delta, see cpu/backward.h.
struct Gradients {
  mx::array &query, &key, &value, &delta;
};

}  // namespace flashattn
