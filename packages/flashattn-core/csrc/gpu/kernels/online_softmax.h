// The running maximum and sum of one row (Milakov & Gimelshein 2018, arXiv:1805.02867), in units of log2(e).
#pragma once

#include "dialect.h"

namespace flashattn {

struct OnlineSoftmax {
  float row_max;
  float row_sum;

  // What is subtracted before exp2. Where nothing is visible yet any finite number gives exp2(-inf) = 0, and
  // -inf - -inf would give NaN.
  FLASHATTN_FUNC float reference() const FLASHATTN_THREAD { return row_max == -INFINITY ? 0.0f : row_max; }

  FLASHATTN_FUNC float probability(float score) const FLASHATTN_THREAD { return fast_exp2(score - reference()); }

  // Takes the maximum of further scores in; returns by what everything summed so far is to be multiplied.
  FLASHATTN_FUNC float raise(float score_max) FLASHATTN_THREAD {
    float old_max = row_max;
    row_max = maximum(row_max, score_max);
    float rescale = fast_exp2(old_max - reference());
    row_sum *= rescale;
    return rescale;
  }
};

FLASHATTN_FUNC OnlineSoftmax empty_row() {
  return OnlineSoftmax{-INFINITY, 0.0f};
}

}  // namespace flashattn
