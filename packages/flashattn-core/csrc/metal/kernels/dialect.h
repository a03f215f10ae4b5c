// Metal's definitions of the macros and functions that gpu/kernels uses. Each GPU backend has such a file.
#pragma once

#include <metal_stdlib>

#define FLASHATTN_FUNC METAL_FUNC         // precedes a function, which is always inlined
#define FLASHATTN_DEVICE device           // memory of arrays
#define FLASHATTN_UNIFORM const constant  // read-only memory that all threads share, for parameters and constants
#define FLASHATTN_SHARED threadgroup
#define FLASHATTN_THREAD thread  // memory of one thread; also qualifies methods of objects in such memory
#define FLASHATTN_UNROLL _Pragma("clang loop unroll(full)")
#define FLASHATTN_ROLLED _Pragma("clang loop unroll(disable)")

// Width of a SIMD group on every Apple GPU.
#define FLASHATTN_LANES 32

// Threads synchronise in these macros. They are not functions, because the emulator in tests/ identifies a barrier by
// its line number.
#define FLASHATTN_BARRIER threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define FLASHATTN_LANE_SUM(x) metal::simd_sum(x)
#define FLASHATTN_LANE_MAX(x) metal::simd_max(x)
#define FLASHATTN_LANE_VALUE(x, lane) metal::simd_shuffle(x, ushort(lane))

// Metal has the types half, bfloat, uint, uchar, ushort, int64_t and float2, and the constants INFINITY, FLT_MAX,
// M_LOG2E_F and M_LN2_F. Other backends define them in their dialect.h.
namespace flashattn {

template <typename T>
METAL_FUNC T minimum(T a, T b) {
  return metal::min(a, b);
}
template <typename T>
METAL_FUNC T maximum(T a, T b) {
  return metal::max(a, b);
}
METAL_FUNC int clamped(int x, int lowest, int highest) {
  return metal::clamp(x, lowest, highest);
}
METAL_FUNC int absolute(int x) {
  return metal::abs(x);
}

METAL_FUNC float at_most_zero(float x) {  // NaN stays NaN
  return x > 0 ? 0.0f : x;
}
METAL_FUNC float multiply_add(float a, float b, float c) {
  return metal::fma(a, b, c);
}
// A product that the compiler never fuses with an addition. So a score is the same in all kernels.
METAL_FUNC float rounded_product(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
METAL_FUNC float fast_exp2(float x) {
  return metal::fast::exp2(x);
}
METAL_FUNC float precise_log2(float x) {
  return metal::precise::log2(x);
}
METAL_FUNC float precise_tanh(float x) {  // fast::tanh overflows to NaN from about 44 on
  return metal::precise::tanh(x);
}

}  // namespace flashattn
