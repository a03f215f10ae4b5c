// Attention as a graph of MLX's operations. Used for forward-mode and second derivatives, for gradients of additive
// masks and slopes, and in exported functions. Needs memory in proportion to L * S.
#pragma once

#include "../request/arguments.h"
#include "deferred.h"

namespace flashattn {

// Returns a function from a primitive's inputs to {out, lse}. The function computes in float32. `out` has query's
// dtype. A row that sees nothing gets out 0, lse -inf and gradients 0. Keys that no query sees, and queries that see
// nothing, may hold NaN. In an exported shapeless function, the numbers of heads may change only if H_kv was H_q.
Function unfused_attention(const Options& options, const Present& present, const mx::Stream& stream);

}  // namespace flashattn
