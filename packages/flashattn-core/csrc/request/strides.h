// The strides of a call's arrays, and its outputs by name.
#pragma once

#include "../call/params.h"
#include "arguments.h"

namespace flashattn {

// The forward pass's outputs, which the backward pass reads. A pointer is null if the call does not have the output.
struct Outputs {
  const mx::array& out;
  const mx::array *lse, *row_stats;
  const mx::array* exact_out = nullptr;  // out in float32, before it is rounded to 16 bits; has the strides of out
};

// The backward pass reads these arrays and the forward pass's inputs.
struct GradientInputs {
  Outputs saved;                  // the forward pass's outputs; with exact_out, out is the same array
  const mx::array& out_gradient;  // the cotangent of out
  const mx::array& lse_gradient;  // the cotangent of lse
};

// The backward pass writes three gradients and delta, see cpu/backward.h.
struct Gradients {
  mx::array &query, &key, &value, &delta;
};

// The strides of an array that has the dimensions `axes` after the batch dimensions. A dimension that is missing or has
// size 1 gets stride 0, because the array is broadcast along it.
Strides strides_of(const mx::array& array, int batch_dims, AxesUsed axes);

constexpr AxesUsed kTensorAxes = {true, true, true};  // (*B, H, L, D)
constexpr AxesUsed kRowAxes = {true, true, false};    // (*B, H, L)

// Gives an array (*B, H, L, D), before anything is written to it, strides that put each query's heads side by side.
// Models join them next, which then takes no copy.
void order_by_query(mx::array& out);

// Adds the strides of evaluated arrays to the description of their call.
void set_strides(AttentionParams& params, const Inputs& inputs, const Outputs& outputs);

}  // namespace flashattn
