// The running maximum and sum of one row (Milakov & Gimelshein 2018, arXiv:1805.02867).
#pragma once

#include "dialect.h"

namespace flashattn {

struct OnlineSoftmax {
  float row_max;
  float row_sum;

  // The number to subtract from scores before exponentiating them. It is the maximum, or 0 as long as the row has seen
  // no key, because -inf - -inf would be NaN.
  FLASHATTN_FUNC float reference() const FLASHATTN_THREAD { return row_max == -INFINITY ? 0.0f : row_max; }

  // Multiplies by log2(e) only after the subtraction. If large scores were multiplied first, rounding would change
  // their differences.
  FLASHATTN_FUNC float probability(float score) const FLASHATTN_THREAD {
    return fast_exp2((score - reference()) * M_LOG2E_F);
  }

  // Raises the maximum to at least score_max, and rescales the sum. Returns the factor by which the caller must rescale
  // the output. unit: the factor that turns a difference of maxima into an exponent of two.
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
