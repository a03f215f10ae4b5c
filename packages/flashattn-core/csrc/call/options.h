// Checks scale, softcap and window. The op and the tests use this file.
#pragma once

#include <cmath>

#include "fail.h"
#include "params.h"

namespace flashattn {

// Throws std::invalid_argument for a value that is not allowed. Options: a struct with the members softcap and window.
template <typename Options>
void check_score_options(float scale, const Options& options) {
  if (!std::isfinite(scale)) {
    fail("scale is ", scale, ", expected a finite number");
  }
  if (!std::isfinite(options.softcap) || options.softcap < 0) {
    fail("softcap is ", options.softcap, ", expected a finite number, or 0 for none");
  }
  // With soft-cap, GPU kernels multiply by scale / softcap. So this quotient must be finite, too.
  if (options.softcap > 0 && !std::isfinite(scale / options.softcap)) {
    fail("softcap is ", options.softcap, ", expected a number by which scale, ", scale, ", can be divided");
  }
  if (options.window < 0) {
    fail("window is ", options.window, ", expected at least 1");
  }
}

// Whether scale / softcap or the result of tanh could underflow. If so, kernels divide by softcap in a separate step.
inline bool has_extreme_softcap(const AttentionParams& params) {
  constexpr float kLargest = 0x1p100f;
  if (params.softcap == 0) return false;
  return params.softcap > kLargest || std::abs(params.scale / params.softcap) < 1 / kLargest;
}

}  // namespace flashattn
