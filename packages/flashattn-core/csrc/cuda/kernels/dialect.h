// CUDA's definitions of the macros and functions that gpu/kernels uses, without CUDA's headers.
#pragma once

#define FLASHATTN_FUNC __device__ __forceinline__  // precedes a function
#define FLASHATTN_DEVICE                           // the address space of arrays; CUDA code does not name it
#define FLASHATTN_UNIFORM const
#define FLASHATTN_SHARED
#define FLASHATTN_THREAD
#define FLASHATTN_UNROLL _Pragma("unroll")
#define FLASHATTN_ROLLED _Pragma("unroll 1")

// Width of a warp, which gpu/kernels calls a SIMD group.
#define FLASHATTN_LANES 32

#define FLASHATTN_BARRIER __syncthreads()
#define FLASHATTN_LANE_SUM(x) ::flashattn::lane_sum<FLASHATTN_LANES>(x)
#define FLASHATTN_LANE_MAX(x) ::flashattn::lane_max<FLASHATTN_LANES>(x)
#define FLASHATTN_LANE_VALUE(x, lane) __shfl_sync(~0u, x, int(lane))

#define INFINITY __int_as_float(0x7f800000)
#define FLT_MAX 3.402823466e+38f
#define M_LOG2E_F 1.4426950408889634f
#define M_LN2_F 0.6931471805599453f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;  // int32_t, int64_t and uint64_t come from source_text()

namespace flashattn {

// 16-bit floats. PTX instructions convert them, because this file does not include CUDA's headers.
struct half {
  ushort bits;

  half() = default;
  FLASHATTN_FUNC explicit half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  FLASHATTN_FUNC explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
struct bfloat {
  ushort bits;

  bfloat() = default;
  FLASHATTN_FUNC explicit bfloat(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  FLASHATTN_FUNC explicit operator float() const { return __uint_as_float(uint(bits) << 16); }
};

template <typename T>
FLASHATTN_FUNC T minimum(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
FLASHATTN_FUNC T maximum(T a, T b) {
  return a > b ? a : b;
}
FLASHATTN_FUNC float maximum(float a, float b) {
  return fmaxf(a, b);
}
FLASHATTN_FUNC int clamped(int x, int lowest, int highest) {
  return minimum(maximum(x, lowest), highest);
}
FLASHATTN_FUNC int absolute(int x) {
  return x < 0 ? -x : x;
}

FLASHATTN_FUNC float at_most_zero(float x) {  // NaN stays NaN
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(0.0f));
  return y;
}
FLASHATTN_FUNC float multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
// A product that the compiler never fuses with an addition. So a score is the same in all kernels.
FLASHATTN_FUNC float rounded_product(float a, float b) {
  return __fmul_rn(a, b);
}
FLASHATTN_FUNC float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASHATTN_FUNC float precise_log2(float x) {
  return log2f(x);
}
FLASHATTN_FUNC float precise_tanh(float x) {
  return tanhf(x);
}

// Reductions over N lanes that are STEP apart. All of these lanes get the result.
template <int N, int STEP = 1>
FLASHATTN_FUNC float lane_sum(float x) {
  FLASHATTN_UNROLL
  for (int step = STEP; step < N * STEP; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <int N, int STEP = 1>
FLASHATTN_FUNC float lane_max(float x) {
  FLASHATTN_UNROLL
  for (int step = STEP; step < N * STEP; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

}  // namespace flashattn
