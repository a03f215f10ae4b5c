// The running maximum and sum of one row (Milakov & Gimelshein 2018, arXiv:1805.02867).
#pragma once

#include "dialect.h"

namespace flashattn {

struct OnlineSoftmax {
  float row_max;
  float row_sum;

  // Scores minus this number are exponentiated. While nothing is visible it is 0 instead of -inf: scores of -inf then
  // get weight 0, where -inf - -inf would give NaN.
  FLASHATTN_FUNC float reference() const FLASHATTN_THREAD { return row_max == -INFINITY ? 0.0f : row_max; }

  // Multiplies by log2(e) after the subtraction: before it, rounding would lose the differences of large scores.
  FLASHATTN_FUNC float probability(float score) const FLASHATTN_THREAD {
    return fast_exp2((score - reference()) * M_LOG2E_F);
  }

  // Raises the maximum to that of further scores. Returns the factor for everything summed so far. unit: turns
  // differences of maxima into exponents of two.
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
