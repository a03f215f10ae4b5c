// The running maximum and sum of one row (Milakov & Gimelshein 2018, arXiv:1805.02867).
#pragma once

#include "dialect.h"

namespace flashattn {

struct OnlineSoftmax {
  float row_max;
  float row_sum;

  // What is subtracted from scores. Where nothing is visible yet any finite number gives -inf, of which the weight is
  // 0, and -inf - -inf would give NaN.
  FLASHATTN_FUNC float reference() const FLASHATTN_THREAD { return row_max == -INFINITY ? 0.0f : row_max; }

  // log2(e) comes after the subtraction: multiplied by it, large scores would lose what they differ by.
  FLASHATTN_FUNC float probability(float score) const FLASHATTN_THREAD {
    return fast_exp2((score - reference()) * M_LOG2E_F);
  }

  // Takes the maximum of further scores in; returns by what everything summed so far is to be multiplied. unit: of
  // maxima, in powers of two.
  FLASHATTN_FUNC float raise(float score_max, float unit = M_LOG2E_F) FLASHATTN_THREAD {
    float old_max = row_max;
    row_max = maximum(row_max, score_max);
    float rescale = fast_exp2((old_max - reference()) * unit);
    row_sum *= rescale;
    return rescale;
  }
};

FLASHATTN_FUNC OnlineSoftmax empty_row() {
  return OnlineSoftmax{-INFINITY, 0.0f};
}

}  // namespace flashattn
