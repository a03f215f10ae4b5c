// <metal_math>, <metal_common> and <metal_integer>, for floats and integers. fast:: and precise:: have no effect.
#pragma once

namespace metal {
// Increases the counter by an asm statement, which hides this write from the compiler. After a call or a visible
// write, the compiler would read values from buffers again, and so change the counts.
METAL_FUNC void count_transcendental() {
#ifndef MSL_CHECK_ADDRESS_SPACES
  asm volatile("incq msl_transcendentals(%%rip)" ::: "cc");
#endif
}

#define MSL_TRANSCENDENTAL(name)   \
  METAL_FUNC float name(float x) { \
    count_transcendental();        \
    return __builtin_##name##f(x); \
  }
MSL_TRANSCENDENTAL(exp)
MSL_TRANSCENDENTAL(exp2)
MSL_TRANSCENDENTAL(log2)
MSL_TRANSCENDENTAL(tanh)
#undef MSL_TRANSCENDENTAL
namespace fast {
using metal::exp, metal::exp2;
}
namespace precise {
using metal::log2, metal::tanh;
}

METAL_FUNC int abs(int x) {
  return x < 0 ? -x : x;
}
METAL_FUNC float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

// If one argument is NaN, the result is the other argument, as in Metal.
#define MSL_MIN_MAX(T)                            \
  METAL_FUNC constexpr T max(T a, T b) {          \
    return b != b ? a : a != a || a < b ? b : a;  \
  }                                               \
  METAL_FUNC constexpr T min(T a, T b) {          \
    return b != b ? a : a != a || b < a ? b : a;  \
  }                                               \
  METAL_FUNC constexpr T clamp(T x, T lo, T hi) { \
    return min(max(x, lo), hi);                   \
  }
MSL_MIN_MAX(int)
MSL_MIN_MAX(uint)
MSL_MIN_MAX(short)
MSL_MIN_MAX(long)
MSL_MIN_MAX(float)
#undef MSL_MIN_MAX
}  // namespace metal
