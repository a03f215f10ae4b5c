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
MSL_TRANSCENDENTAL(exp10, __builtin_exp10f(x))
MSL_TRANSCENDENTAL(log, __builtin_logf(x))
MSL_TRANSCENDENTAL(log2, __builtin_log2f(x))
MSL_TRANSCENDENTAL(log10, __builtin_log10f(x))
MSL_TRANSCENDENTAL(sqrt, __builtin_sqrtf(x))
MSL_TRANSCENDENTAL(rsqrt, 1.0f / __builtin_sqrtf(x))
MSL_TRANSCENDENTAL(sin, __builtin_sinf(x))
MSL_TRANSCENDENTAL(cos, __builtin_cosf(x))
MSL_TRANSCENDENTAL(tan, __builtin_tanf(x))
MSL_TRANSCENDENTAL(tanh, __builtin_tanhf(x))
MSL_TRANSCENDENTAL(atan, __builtin_atanf(x))
MSL_UNARY(abs, __builtin_fabsf(x))
MSL_UNARY(fabs, __builtin_fabsf(x))
MSL_UNARY(floor, __builtin_floorf(x))
MSL_UNARY(ceil, __builtin_ceilf(x))
MSL_UNARY(round, __builtin_roundf(x))
MSL_UNARY(rint, __builtin_rintf(x))
MSL_UNARY(trunc, __builtin_truncf(x))
MSL_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)
#undef MSL_TRANSCENDENTAL
#undef MSL_UNARY

METAL_FUNC float pow(float x, float y) {
  return count_transcendental(), __builtin_powf(x, y);
}
METAL_FUNC float powr(float x, float y) {
  return count_transcendental(), __builtin_powf(x, y);
}
METAL_FUNC float atan2(float y, float x) {
  return count_transcendental(), __builtin_atan2f(y, x);
}
METAL_FUNC float fmod(float x, float y) {
  return __builtin_fmodf(x, y);
}
METAL_FUNC float ldexp(float x, int exponent) {
  return __builtin_ldexpf(x, exponent);
}
METAL_FUNC float divide(float x, float y) {
  return x / y;
}

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

#define MSL_VECTOR_BINARY(name)                                \
  template <class T, int N>                                    \
  METAL_FUNC vec<T, N> name(vec<T, N> a, vec<T, N> b) {        \
    for (int i = 0; i < N; i++) a[i] = name((T)a[i], (T)b[i]); \
    return a;                                                  \
  }                                                            \
  template <class T, int N>                                    \
  METAL_FUNC vec<T, N> name(vec<T, N> a, T b) {                \
    for (int i = 0; i < N; i++) a[i] = name((T)a[i], b);       \
    return a;                                                  \
  }
MSL_VECTOR_BINARY(max)
MSL_VECTOR_BINARY(min)
#undef MSL_VECTOR_BINARY

#define MSL_FLOATING(T)                   \
  METAL_FUNC T fmax(T a, T b) {           \
    return max(a, b);                     \
  }                                       \
  METAL_FUNC T fmin(T a, T b) {           \
    return min(a, b);                     \
  }                                       \
  METAL_FUNC T saturate(T x) {            \
    return clamp(x, (T)0.0f, (T)1.0f);    \
  }                                       \
  METAL_FUNC T mix(T a, T b, T t) {       \
    return a + (b - a) * t;               \
  }                                       \
  METAL_FUNC bool isnan(T x) {            \
    return x != x;                        \
  }                                       \
  METAL_FUNC bool isinf(T x) {            \
    return abs(x) == (T)__builtin_inff(); \
  }                                       \
  METAL_FUNC bool isfinite(T x) {         \
    return !isnan(x) && !isinf(x);        \
  }
MSL_FLOATING(float)
MSL_FLOATING(half)
MSL_FLOATING(bfloat)
#undef MSL_FLOATING

METAL_FUNC int abs(int x) {
  return x < 0 ? -x : x;
}
METAL_FUNC uint popcount(uint x) {
  return __builtin_popcount(x);
}
METAL_FUNC uint clz(uint x) {
  return x ? __builtin_clz(x) : 32;
}
METAL_FUNC uint ctz(uint x) {
  return x ? __builtin_ctz(x) : 32;
}

#define MSL_NAMESPACE(name)                                                                           \
  namespace name {                                                                                    \
  using metal::abs, metal::atan, metal::atan2, metal::ceil, metal::clamp, metal::cos, metal::divide;  \
  using metal::exp, metal::exp10, metal::exp2, metal::fabs, metal::floor, metal::fma, metal::fmax;    \
  using metal::fmin, metal::fmod, metal::isinf, metal::isnan, metal::log, metal::log10, metal::log2;  \
  using metal::max, metal::min, metal::pow, metal::powr, metal::rint, metal::round, metal::rsqrt;     \
  using metal::saturate, metal::sign, metal::sin, metal::sqrt, metal::tan, metal::tanh, metal::trunc; \
  }
MSL_NAMESPACE(fast)
MSL_NAMESPACE(precise)
#undef MSL_NAMESPACE
}  // namespace metal
