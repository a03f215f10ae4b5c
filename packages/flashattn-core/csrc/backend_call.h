// From arrays to the plain structs that the backends read.
#pragma once

#include "arguments.h"
#include "cpu/backward.h"
#include "metal/encode.h"

namespace flashattn {

// What a gradient reads besides the forward pass's inputs.
struct Saved {
  const mx::array &out, &lse;     // as the forward pass has left them
  const mx::array& out_gradient;  // what comes back for out
  const mx::array* lse_gradient;  // and for lse; null: zeros
};

// The forward pass writes out and lse.
cpu::AttentionArgs cpu_forward(const Inputs& inputs, const Options& options, const mx::array& out,
                               const mx::array& lse);
metal::Work metal_forward(Kernel kernel, const Inputs& inputs, const Options& options, const mx::array& out,
                          const mx::array& lse);

// `gradients`: of query, key and value, and delta, see cpu/backward.h.
cpu::BackwardArgs cpu_backward(const Inputs& inputs, const Options& options, const Saved& saved,
                               std::vector<mx::array>& gradients);
metal::Work metal_backward(const Inputs& inputs, const Options& options, const Saved& saved,
                           const std::vector<mx::array>& gradients);

}  // namespace flashattn
