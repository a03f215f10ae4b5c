// From arrays to the plain struct that every backend reads.
#pragma once

#include "../call/dtype.h"
#include "../call/params.h"
#include "arguments.h"

namespace flashattn {

// What the forward pass writes, and the gradient reads again. Null: nobody asks for it.
struct Outputs {
  const mx::array& out;
  const mx::array *lse, *row_stats;
};

// Of an array whose dimensions behind the batch's are those that `axes` uses. Missing dimensions and those of size 1
// get stride 0: they are broadcast.
Strides strides_of(const mx::array& array, int batch_dims, AxesUsed axes);

constexpr AxesUsed kTensorAxes = {true, true, true};  // (*B, H, L, D)
constexpr AxesUsed kRowAxes = {true, true, false};    // (*B, H, L)

AttentionParams make_params(const Inputs& inputs, const Options& options, const Outputs& outputs);

// float32 where the array is absent.
Dtype dtype_of(const mx::array* array);

}  // namespace flashattn
