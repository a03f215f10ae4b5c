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

#ifndef MSL_CHECK_ADDRESS_SPACES  // OpenCL has its own half
typedef _Float16 half;
#endif
typedef __bf16 bfloat;

#define MSL_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(float)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
#undef MSL_VECTORS

#define INFINITY __builtin_inff()
#define FLT_MAX __FLT_MAX__
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}  // namespace metal
