// The floating-point dtypes of attention's inputs and outputs, and their sizes in bytes.
#pragma once

#include <cstdint>

namespace flashattn {

enum class Dtype : int32_t { float32, float16, bfloat16 };  // kernels use the same numbers

constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

}  // namespace flashattn
