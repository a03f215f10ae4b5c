// NaN and infinity. A value that a row does not see must not reach it, and a probability of 0 does not stop these:
// 0 * NaN is NaN. So products of probabilities and values leave them out, and add them afterwards where they are seen.
#pragma once

#include "dialect.h"

namespace flashattn {

FLASHATTN_FUNC bool is_finite(float x) {
  return x - x == 0;
}
FLASHATTN_FUNC float finite_or_zero(float x) {
  return is_finite(x) ? x : 0.0f;
}

// What is missing after finite_or_zero().
FLASHATTN_FUNC float not_finite_term(float probability, float value) {
  return probability == 0 || is_finite(value) ? 0.0f : probability * value;
}

}  // namespace flashattn
