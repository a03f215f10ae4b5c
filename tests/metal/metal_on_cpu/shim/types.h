// Scalars, vectors and the constants of metal_stdlib.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef unsigned long uintptr_t;

#ifndef MSL_CHECK_ADDRESS_SPACES  // OpenCL has its own half
typedef _Float16 half;
#endif
typedef __bf16 bfloat;

METAL_FUNC constexpr half operator""h(long double value) {
  return (half)value;
}
METAL_FUNC constexpr half operator""h(unsigned long long value) {
  return (half)value;
}
METAL_FUNC constexpr bfloat operator"" bf(long double value) {
  return (bfloat)value;
}

#define MSL_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
#ifndef MSL_CHECK_ADDRESS_SPACES  // OpenCL has no vectors of bool
MSL_VECTORS(bool)
#endif
#undef MSL_VECTORS

// Vectors without the alignment of vectors.
#define MSL_PACKED(T)           \
  struct packed_##T##2 {        \
    T x, y;                     \
    operator T##2() const {     \
      return T##2 {x, y};       \
    }                           \
  };                            \
  struct packed_##T##3 {        \
    T x, y, z;                  \
    operator T##3() const {     \
      return T##3 {x, y, z};    \
    }                           \
  };                            \
  struct packed_##T##4 {        \
    T x, y, z, w;               \
    operator T##4() const {     \
      return T##4 {x, y, z, w}; \
    }                           \
  };
MSL_PACKED(float)
MSL_PACKED(half)
MSL_PACKED(int)
MSL_PACKED(uint)
#undef MSL_PACKED

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX ((half)65504)
#define HALF_MIN ((half)6.103515625e-05f)
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (~0u)
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_PI_F 3.14159265358979323846f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f

namespace metal {
#ifndef MSL_CHECK_ADDRESS_SPACES
using ::half;
#endif
using ::bfloat;
using ::size_t;
using ::uint;
using ::ulong;
using ::ushort;
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}  // namespace metal
