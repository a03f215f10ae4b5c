// The precision in which a kernel multiplies probabilities. flash_attention() in Python documents both values.
#pragma once

#include <cstdint>

namespace flashattn {

enum class Precision : int32_t {
  float32,  // all arithmetic is float32-accurate
  input     // probabilities, and dS in the gradient, are rounded once to the inputs' dtype
};

}  // namespace flashattn
