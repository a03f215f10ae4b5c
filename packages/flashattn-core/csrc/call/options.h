// Recognises a soft-cap for which GPU kernels need a separate form.
#pragma once

#include <cmath>

#include "params.h"

namespace flashattn {

// Whether scale / softcap or the result of tanh could underflow. If so, kernels divide by softcap in a separate step.
inline bool has_extreme_softcap(const AttentionParams& params) {
  constexpr float kLargest = 0x1p100f;
  if (params.softcap == 0) return false;
  return params.softcap > kLargest || std::abs(params.scale / params.softcap) < 1 / kLargest;
}

}  // namespace flashattn
