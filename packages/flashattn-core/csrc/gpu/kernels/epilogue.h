// Finishes a row after its last key: adds the sink, divides the output by the sum, and stores lse, maximum and sum.
#pragma once

#include "offsets.h"
#include "online_softmax.h"

namespace flashattn {

struct RowResult {
  float normalise;  // the factor by which the row's output must be multiplied
  float lse;        // log-sum-exp, as a natural logarithm
  OnlineSoftmax softmax;
};

// A sink adds only to the denominator. A row that sees no key gets output 0 and lse -inf, even with a sink.
FLASHATTN_FUNC RowResult finish_row(OnlineSoftmax softmax, const FLASHATTN_DEVICE uchar* sinks,
                                    FLASHATTN_UNIFORM AttentionParams& params, int batch, int head) {
  if (softmax.row_sum == 0) {  // no key is visible: with a visible key, row_sum is at least 1 or NaN
    return RowResult{0.0f, -INFINITY, softmax};
  }
  float normalise = 1;
  if (has_sinks) {
    int64_t offset = batch_offset(params, params.sinks, batch) + head * params.sinks.head;
    float sink = load_float(sinks, sinks_dtype, offset);
    normalise = softmax.raise(sink);
    softmax.row_sum += softmax.probability(sink);
  }
  float lse = multiply_add(M_LN2_F, precise_log2(softmax.row_sum), softmax.row_max);
  return RowResult{normalise / softmax.row_sum, lse, softmax};
}

// A kernel's outputs. On CUDA lse and row_stats are null if the call does not need them. The constant has_exact_out
// tells whether the kernel must write exact_out: out before it is rounded.
template <typename T>
struct RowOutputs {
  FLASHATTN_DEVICE T* out;
  FLASHATTN_DEVICE float* lse;
  FLASHATTN_DEVICE float* row_stats;
  FLASHATTN_DEVICE float* exact_out;

  // Where the output row of a query begins.
  FLASHATTN_FUNC FLASHATTN_DEVICE T* out_row(FLASHATTN_UNIFORM AttentionParams& params, int batch, int head,
                                             int query) const FLASHATTN_THREAD {
    return row_of(out, params, params.out, batch, head, query);
  }
  FLASHATTN_FUNC FLASHATTN_DEVICE float* exact_row(FLASHATTN_UNIFORM AttentionParams& params, int batch, int head,
                                                   int query) const FLASHATTN_THREAD {
    return row_of(exact_out, params, params.out, batch, head, query);
  }
  // Writes lse and row_stats.
  FLASHATTN_FUNC void store_result(FLASHATTN_UNIFORM AttentionParams& params, int batch, int head, int query,
                                   RowResult result) const FLASHATTN_THREAD {
    if (lse == nullptr) {
      return;
    }
    *row_of(lse, params, params.lse, batch, head, query) = result.lse;
    FLASHATTN_DEVICE float* stats = row_of(row_stats, params, params.row_stats, batch, head, query);
    stats[0] = result.softmax.row_max;
    stats[params.row_stats.column] = result.softmax.row_sum;
  }
};
#define FLASHATTN_ROW_OUTPUTS(T) (RowOutputs<T>{out, lse, row_stats, exact_out})

}  // namespace flashattn
