// <metal_limits>: numeric_limits of floating types.
#pragma once

namespace metal {
template <class T>
struct numeric_limits {
  static constexpr T infinity() { return (T)__builtin_inff(); }
  static constexpr T max() {
    if (__is_same(T, half)) return (T)65504.0f;
    return __is_same(T, bfloat) ? (T)3.38953138925153547590470800371487866880e+38f : (T)__FLT_MAX__;
  }
};
}  // namespace metal
