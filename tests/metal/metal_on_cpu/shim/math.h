// <metal_math>, <metal_common>, <metal_integer>. Computed in float and rounded once; fast:: and precise:: are the same.
#pragma once

namespace metal {
// Counted by an instruction that the compiler takes for one without effect on memory: a call, or a store that could
// alias a buffer, would make it read buffers again which it had already read.
METAL_FUNC void count_transcendental() {
#ifndef MSL_CHECK_ADDRESS_SPACES
  asm volatile("incq msl_transcendentals(%%rip)" ::: "cc");
#endif
}

#define MSL_UNARY(name, expression)                   \
  METAL_FUNC float name(float x) {                    \
    return expression;                                \
  }                                                   \
  METAL_FUNC half name(half value) {                  \
    float x = value;                                  \
    return (half)(expression);                        \
  }                                                   \
  METAL_FUNC bfloat name(bfloat value) {              \
    float x = value;                                  \
    return (bfloat)(expression);                      \
  }                                                   \
  template <class T, int N>                           \
  METAL_FUNC vec<T, N> name(vec<T, N> v) {            \
    for (int i = 0; i < N; i++) v[i] = name((T)v[i]); \
    return v;                                         \
  }
#define MSL_TRANSCENDENTAL(name, expression) MSL_UNARY(name, (count_transcendental(), expression))
MSL_TRANSCENDENTAL(exp, __builtin_expf(x))
MSL_TRANSCENDENTAL(exp2, __builtin_exp2f(x))
MSL_TRANSCENDENTAL(log, __builtin_logf(x))
MSL_TRANSCENDENTAL(log2, __builtin_log2f(x))
MSL_TRANSCENDENTAL(tanh, __builtin_tanhf(x))
MSL_UNARY(abs, __builtin_fabsf(x))
#undef MSL_TRANSCENDENTAL
#undef MSL_UNARY

METAL_FUNC float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
METAL_FUNC half fma(half a, half b, half c) {
  return (half)__builtin_fmaf(a, b, c);
}
METAL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) {
  return (bfloat)__builtin_fmaf(a, b, c);
}
template <class T, int N>
METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; i++) a[i] = fma((T)a[i], (T)b[i], (T)c[i]);
  return a;
}

// A NaN loses against a number, as in Metal.
#define MSL_MIN_MAX(T, a_is_nan, b_is_nan)           \
  METAL_FUNC constexpr T max(T a, T b) {             \
    return b_is_nan ? a : a_is_nan || a < b ? b : a; \
  }                                                  \
  METAL_FUNC constexpr T min(T a, T b) {             \
    return b_is_nan ? a : a_is_nan || b < a ? b : a; \
  }                                                  \
  METAL_FUNC constexpr T clamp(T x, T low, T high) { \
    return min(max(x, low), high);                   \
  }
MSL_MIN_MAX(int, false, false)
MSL_MIN_MAX(uint, false, false)
MSL_MIN_MAX(short, false, false)
MSL_MIN_MAX(ushort, false, false)
MSL_MIN_MAX(long, false, false)
MSL_MIN_MAX(ulong, false, false)
MSL_MIN_MAX(char, false, false)
MSL_MIN_MAX(uchar, false, false)
MSL_MIN_MAX(float, a != a, b != b)
MSL_MIN_MAX(half, a != a, b != b)
MSL_MIN_MAX(bfloat, a != a, b != b)
#undef MSL_MIN_MAX

METAL_FUNC int abs(int x) {
  return x < 0 ? -x : x;
}
namespace fast {
using metal::exp, metal::exp2, metal::log, metal::log2, metal::tanh;
}
namespace precise {
using metal::exp, metal::exp2, metal::log, metal::log2, metal::tanh;
}
}  // namespace metal
