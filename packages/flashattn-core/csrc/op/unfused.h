// Attention written out as a graph of MLX's operations, for what the kernels do not compute: forward-mode and second
// derivatives, gradients of additive masks and slopes, exported functions. Its memory grows with L * S.
#pragma once

#include "../request/arguments.h"
#include "derivatives.h"

namespace flashattn {

// Returns a function from a primitive's inputs to {out, lse}. It computes in float32; out has query's dtype. A row that
// sees nothing gets out 0, lse -inf and gradients 0. Keys that no query sees, and queries that see nothing, may hold
// NaN. If the function was exported without its shapes, it may be called with other shapes.
Function unfused_attention(const Options& options, const Present& present, const mx::Stream& stream);

}  // namespace flashattn
