// NaN and infinity. A value that a row does not see must not reach it, but probability 0 stops neither: 0 * NaN is NaN.
// So products of probabilities and values take both as 0, and add them later for rows that see them.
#pragma once

#include "dialect.h"

namespace flashattn {

FLASHATTN_FUNC bool is_finite(float x) {
  return x - x == 0;
}
FLASHATTN_FUNC float finite_or_zero(float x) {
  return is_finite(x) ? x : 0.0f;
}

// The term that finite_or_zero() left out.
FLASHATTN_FUNC float not_finite_term(float probability, float value) {
  return probability == 0 || is_finite(value) ? 0.0f : probability * value;
}

}  // namespace flashattn
