// NaN or infinity in a hidden key or value must not change a row's result. A probability of 0 is not enough, because
// 0 * NaN is NaN. So matrix products replace NaN and infinite elements with 0. The terms of these elements are added
// separately, for rows with a probability above 0.
#pragma once

#include "dialect.h"

namespace flashattn {

FLASHATTN_FUNC bool is_finite(float x) {
  return x - x == 0;
}
FLASHATTN_FUNC float finite_or_zero(float x) {
  return is_finite(x) ? x : 0.0f;
}

// The term that a product omits if finite_or_zero() replaced the value.
FLASHATTN_FUNC float not_finite_term(float probability, float value) {
  return probability == 0 || is_finite(value) ? 0.0f : probability * value;
}

}  // namespace flashattn
