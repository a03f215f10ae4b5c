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

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f

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
