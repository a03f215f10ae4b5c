// The running maximum and sum of one row (Milakov & Gimelshein 2018, arXiv:1805.02867), in units of log2(e).
#pragma once

#include "variant.h"

namespace flashattn {

struct OnlineSoftmax {
  float row_max;
  float row_sum;

  // What is subtracted before exp2. Where nothing is visible yet any finite number gives exp2(-inf) = 0, and
  // -inf - -inf would give NaN.
  METAL_FUNC float reference() const thread { return row_max == -INFINITY ? 0.0f : row_max; }

  METAL_FUNC float probability(float score) const thread { return metal::fast::exp2(score - reference()); }

  // Takes the maximum of further scores in; returns by what everything summed so far is to be multiplied.
  METAL_FUNC float raise(float score_max) thread {
    float old_max = row_max;
    row_max = metal::max(row_max, score_max);
    float rescale = metal::fast::exp2(old_max - reference());
    row_sum *= rescale;
    return rescale;
  }
};

METAL_FUNC OnlineSoftmax empty_row() {
  return OnlineSoftmax{-INFINITY, 0.0f};
}

}  // namespace flashattn
