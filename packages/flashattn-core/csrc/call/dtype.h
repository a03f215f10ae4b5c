// The floating-point dtypes of attention's inputs and outputs, and the precision of its arithmetic.
#pragma once

#include <cstdint>

namespace flashattn {

enum class Dtype : int32_t { float32, float16, bfloat16 };  // kernels use the same numbers

constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

// The precision in which a kernel multiplies probabilities. flash_attention() in Python documents both values.
enum class Precision : int32_t {
  float32,  // all arithmetic is float32-accurate
  input     // probabilities, and dS in the gradient, are rounded once to the inputs' dtype
};

}  // namespace flashattn
