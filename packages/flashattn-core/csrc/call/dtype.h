// The dtypes that attention is computed of.
#pragma once

#include <cstdint>

namespace flashattn {

enum class Dtype : int32_t { float32, float16, bfloat16 };  // kernels know them by these numbers

constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::float32 ? 4 : 2;
}

}  // namespace flashattn
