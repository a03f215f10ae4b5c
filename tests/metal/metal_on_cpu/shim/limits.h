// <metal_limits>: numeric_limits of the scalar types.
#pragma once

namespace metal {
template <class T>
struct numeric_limits;

#define MSL_INTEGER_LIMITS(T, smallest, largest) \
  template <>                                    \
  struct numeric_limits<T> {                     \
    static constexpr T min() {                   \
      return smallest;                           \
    }                                            \
    static constexpr T max() {                   \
      return largest;                            \
    }                                            \
    static constexpr T lowest() {                \
      return smallest;                           \
    }                                            \
  };
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(int8_t, -128, 127)
MSL_INTEGER_LIMITS(uint8_t, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, INT_MIN, INT_MAX)
MSL_INTEGER_LIMITS(uint, 0, UINT_MAX)
MSL_INTEGER_LIMITS(long, -__LONG_MAX__ - 1, __LONG_MAX__)
MSL_INTEGER_LIMITS(ulong, 0, ~0ul)
#undef MSL_INTEGER_LIMITS

#define MSL_FLOAT_LIMITS(T, smallest, largest, spacing) \
  template <>                                           \
  struct numeric_limits<T> {                            \
    static constexpr T min() {                          \
      return (T)smallest;                               \
    }                                                   \
    static constexpr T max() {                          \
      return (T)largest;                                \
    }                                                   \
    static constexpr T lowest() {                       \
      return (T) - largest;                             \
    }                                                   \
    static constexpr T epsilon() {                      \
      return (T)spacing;                                \
    }                                                   \
    static constexpr T infinity() {                     \
      return (T)__builtin_inff();                       \
    }                                                   \
    static constexpr T quiet_NaN() {                    \
      return (T)__builtin_nanf("");                     \
    }                                                   \
  };
MSL_FLOAT_LIMITS(float, __FLT_MIN__, __FLT_MAX__, __FLT_EPSILON__)
MSL_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 9.765625e-04f)
MSL_FLOAT_LIMITS(bfloat, __FLT_MIN__, 3.38953138925153547590470800371487866880e+38f, 0.0078125f)
#undef MSL_FLOAT_LIMITS
}  // namespace metal
