// Metal's words for what the text of gpu/kernels says in its own. Each GPU backend has such a file.
#pragma once

#include <metal_stdlib>

#define FLASHATTN_FUNC METAL_FUNC         // in front of a function: always inlined
#define FLASHATTN_DEVICE device           // memory of arrays
#define FLASHATTN_UNIFORM const constant  // memory that is the same for all threads: parameters, constants
#define FLASHATTN_SHARED threadgroup
#define FLASHATTN_THREAD thread  // what a thread has for itself; behind a method, too
#define FLASHATTN_UNROLL _Pragma("clang loop unroll(full)")
#define FLASHATTN_ROLLED _Pragma("clang loop unroll(disable)")

// Width of a SIMD group on every Apple GPU.
#define FLASHATTN_LANES 32

// Where threads meet: macros and no functions, so that each place in the text remains a place of its own.
#define FLASHATTN_BARRIER threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define FLASHATTN_LANE_SUM(x) metal::simd_sum(x)
#define FLASHATTN_LANE_MAX(x) metal::simd_max(x)
#define FLASHATTN_LANE_VALUE(x, lane) metal::simd_shuffle(x, ushort(lane))

// Types that every dialect knows: half, bfloat, uint, uchar, ushort, int64_t, float2; constants: INFINITY,
// FLT_MAX, M_LOG2E_F, M_LN2_F.
namespace flashattn {

METAL_FUNC int minimum(int a, int b) {
  return metal::min(a, b);
}
METAL_FUNC int64_t minimum(int64_t a, int64_t b) {
  return metal::min(a, b);
}
METAL_FUNC int maximum(int a, int b) {
  return metal::max(a, b);
}
METAL_FUNC int64_t maximum(int64_t a, int64_t b) {
  return metal::max(a, b);
}
METAL_FUNC float maximum(float a, float b) {
  return metal::max(a, b);
}
METAL_FUNC int clamped(int x, int lowest, int highest) {
  return metal::clamp(x, lowest, highest);
}
METAL_FUNC int absolute(int x) {
  return metal::abs(x);
}

METAL_FUNC float at_most_zero(float x) {  // NaN stays
  return x > 0 ? 0.0f : x;
}
METAL_FUNC float multiply_add(float a, float b, float c) {
  return metal::fma(a, b, c);
}
// Rounded, whatever is added to it: a multiply-add would not be what was compared with others for the maximum.
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
