// What becomes of a row once all its keys have gone by: the sink, the division by the sum, lse.
#pragma once

#include "offsets.h"
#include "online_softmax.h"

namespace flashattn {

struct RowResult {
  float normalise;  // multiplies the row's output
  float lse;        // natural logarithm
};

// Only adds to the denominator. A row that sees nothing gives 0 and -inf, with a sink too.
FLASHATTN_FUNC RowResult finish_row(OnlineSoftmax softmax, const FLASHATTN_DEVICE float* sinks,
                                    FLASHATTN_UNIFORM AttentionParams& params, int batch, int head) {
  if (softmax.row_sum == 0) {  // the largest visible score adds 1, and NaN is not 0
    return RowResult{0.0f, -INFINITY};
  }
  float normalise = 1;
  if (has_sinks) {
    float sink = sinks[batch_offset(params, params.sinks, batch) + head * params.sinks.head] * M_LOG2E_F;
    normalise = softmax.raise(sink);
    softmax.row_sum += softmax.probability(sink);
  }
  return RowResult{normalise / softmax.row_sum, M_LN2_F * (softmax.row_max + precise_log2(softmax.row_sum))};
}

// Where the output row of a query begins, and its lse.
template <typename T>
FLASHATTN_FUNC FLASHATTN_DEVICE T* out_row(FLASHATTN_DEVICE T* out, FLASHATTN_UNIFORM AttentionParams& params,
                                           int batch, int head, int query) {
  return out + batch_offset(params, params.out, batch) + head * params.out.head + query * params.out.row;
}
FLASHATTN_FUNC FLASHATTN_DEVICE float* lse_of(FLASHATTN_DEVICE float* lse, FLASHATTN_UNIFORM AttentionParams& params,
                                              int batch, int head, int query) {
  return lse + batch_offset(params, params.lse, batch) + head * params.lse.head + query * params.lse.row;
}

}  // namespace flashattn
