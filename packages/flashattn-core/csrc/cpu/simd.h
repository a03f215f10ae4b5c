// Float vectors, made with the compiler's vector extensions. Arithmetic, comparison and ?: work on whole vectors.
//
// This header and all files that include it are compiled once per instruction set, each time inside a namespace of its
// own. The macro FLASHATTN_ISA is the name of the namespace. These files must not use templates or inline functions of
// the standard library, because the linker keeps only one copy of each, and that copy could contain AVX-512.
#pragma once

#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace flashattn::cpu::FLASHATTN_ISA {

// kWidth: floats in a vector register. A register tile has kTileRows rows of kTileVectors vectors. The tile's
// accumulators, one row of the right operand and one broadcast element just fit the registers. AVX2 and SSE have 16
// registers, AVX-512 and NEON have 32.
//
// FLASHATTN_ZIP_LOW and _HIGH: shuffle indices that interleave the lower or the upper halves of two vectors.
//
// FLASHATTN_NEAR_LOW and _HIGH: indices of a cheaper interleaving that sum_each() uses. AVX2 has one only within each
// half of a vector.
#if defined(__AVX512F__)
constexpr int kWidth = 16, kTileVectors = 4;
#define FLASHATTN_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define FLASHATTN_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
constexpr int kWidth = 8, kTileVectors = 2;
#define FLASHATTN_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define FLASHATTN_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define FLASHATTN_NEAR_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define FLASHATTN_NEAR_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#else
#if defined(__ARM_NEON)
constexpr int kWidth = 4, kTileVectors = 4;
#else
constexpr int kWidth = 4, kTileVectors = 2;
#endif
#define FLASHATTN_ZIP_LOW 0, 4, 1, 5
#define FLASHATTN_ZIP_HIGH 2, 6, 3, 7
#endif
#ifndef FLASHATTN_NEAR_LOW
#define FLASHATTN_NEAR_LOW FLASHATTN_ZIP_LOW
#define FLASHATTN_NEAR_HIGH FLASHATTN_ZIP_HIGH
#endif
constexpr int kTileRows = 6;

typedef float vfloat __attribute__((vector_size(kWidth * sizeof(float))));
typedef int32_t vint __attribute__((vector_size(kWidth * sizeof(int32_t))));
typedef uint32_t vuint __attribute__((vector_size(kWidth * sizeof(uint32_t))));

#define FLASHATTN_INLINE static inline __attribute__((always_inline))
#define FLASHATTN_INLINE_MEMBER inline __attribute__((always_inline))

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.44269504088896340736f;

template <typename T>
FLASHATTN_INLINE constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
FLASHATTN_INLINE constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

// Prefetches into the second-level cache. The first-level cache can wait for only a few lines at a time, so prefetches
// into it would delay a loop's own loads.
constexpr int kLine = 64;
FLASHATTN_INLINE void prefetch_line(const void* line) {
  __builtin_prefetch(line, 0, 2);
}

FLASHATTN_INLINE vfloat load(const float* p) {
  vfloat v;
  __builtin_memcpy(&v, p, sizeof(v));  // no alignment needed; compiles to one unaligned load
  return v;
}
FLASHATTN_INLINE vint load(const int32_t* p) {
  vint v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
FLASHATTN_INLINE vfloat to_float(vint v) {
  return __builtin_convertvector(v, vfloat);
}
FLASHATTN_INLINE void store(float* p, vfloat v) {
  __builtin_memcpy(p, &v, sizeof(v));
}
FLASHATTN_INLINE vfloat broadcast(float x) {
  return x - vfloat{};  // x - 0 is x for every x, also for -0; this compiles to a plain broadcast
}
FLASHATTN_INLINE vfloat vmax(vfloat a, vfloat b) {
  return a < b ? b : a;
}
FLASHATTN_INLINE vfloat zip_low(vfloat a, vfloat b) {
  return __builtin_shufflevector(a, b, FLASHATTN_ZIP_LOW);
}
FLASHATTN_INLINE vfloat zip_high(vfloat a, vfloat b) {
  return __builtin_shufflevector(a, b, FLASHATTN_ZIP_HIGH);
}

// rows[i][j] becomes rows[j][i]. Each of log2(kWidth) rounds zips vector i with vector i + kWidth / 2, for all i.
// Together the rounds exchange the bits of the row number with the bits of the lane number (Stone 1971, "Parallel
// processing with the perfect shuffle"). The rounds are a recursion, because the compiler would not keep the vectors in
// registers in a loop.
template <int Rounds = kWidth>
FLASHATTN_INLINE void transpose(vfloat (&rows)[kWidth]) {
  if constexpr (Rounds > 1) {
    vfloat zipped[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      zipped[2 * i] = zip_low(rows[i], rows[i + kWidth / 2]);
      zipped[2 * i + 1] = zip_high(rows[i], rows[i + kWidth / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) rows[i] = zipped[i];
    transpose<Rounds / 2>(rows);
  }
}

// Lane i of the result is the sum over the lanes of rows[i]. Each round interleaves pairs of vectors and adds the two
// results. Only the last round must bring the halves of a vector together.
template <int Count = kWidth>
FLASHATTN_INLINE vfloat sum_each(vfloat (&rows)[kWidth]) {
  if constexpr (Count == 1) {
    return rows[0];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < Count / 2; ++i) {
      vfloat a = rows[i], b = rows[i + Count / 2], low = __builtin_shufflevector(a, b, FLASHATTN_NEAR_LOW);
      vfloat high = __builtin_shufflevector(a, b, FLASHATTN_NEAR_HIGH);
      rows[i] = Count == 2 ? zip_low(a, b) + zip_high(a, b) : low + high;
    }
    return sum_each<Count / 2>(rows);
  }
}

// 2^f for |f| <= 1/2, as 1 + f p(f) with the minimax polynomial p of degree 5, whose error is 2e-9.
FLASHATTN_INLINE vfloat exp2_of_fraction(vfloat f) {
  vfloat p = broadcast(0.00015353361959569156f);
  p = p * f + 0.0013398875016719103f;
  p = p * f + 0.00961843691766262f;
  p = p * f + 0.055503323674201965f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  return p * f + 1.0f;
}

// 2^(factor x) for x <= 0. The relative error is below 1.3e-7 down to factor x = -126; from -127 on the result is 0.
// NaN stays NaN. Splits factor x into a whole number n and a fraction f with |f| <= 1/2.
FLASHATTN_INLINE vfloat exp2(vfloat x, float factor = 1) {
#if defined(__AVX512F__)
  // AVX-512 has instructions that round x to n and multiply by 2^n. Lanes below -126 become 0, but NaN stays NaN.
  x *= factor;
  __mmask16 in_range = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  vfloat n = _mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_maskz_scalef_ps(in_range, exp2_of_fraction(x - n), n);
#else
#if defined(__AVX2__)
  x = _mm256_max_ps(broadcast(-127.0f / factor), x);  // one instruction, where GCC makes two
#else
  x = x < broadcast(-127.0f / factor) ? broadcast(-127.0f / factor) : x;
#endif
  const vfloat magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  vfloat shifted = x * factor + magic;
  vfloat p = exp2_of_fraction(x * factor - (shifted - magic));
  vint exponent;
  __builtin_memcpy(&exponent, &shifted, sizeof(exponent));
  exponent = (exponent << 23) + (127 << 23);  // the shift pushes out the magic number's own bits
  vfloat power;
  __builtin_memcpy(&power, &exponent, sizeof(power));  // for n = -127 all bits are 0, so 2^x becomes 0
  return p * power;
#endif
}
FLASHATTN_INLINE float exp2(float x) {
  return exp2(broadcast(x))[0];
}

// tanh, with a relative error below 3e-7. For |x| < 0.625 it is x + x^3 p(x^2), with a minimax polynomial p (error
// 4e-9). Otherwise |tanh x| is (1 - e) / (1 + e) with e = exp(-2|x|). This e cannot overflow, and 1 - e loses no
// digits.
FLASHATTN_INLINE vfloat tanh(vfloat x) {
  vfloat magnitude = x < broadcast(0.0f) ? -x : x;
  vfloat z = x * x;
  vfloat p = broadcast(-0.005704984068870544f);
  p = p * z + 0.0206390842795372f;
  p = p * z - 0.05373971536755562f;
  p = p * z + 0.13331441581249237f;
  p = p * z - 0.3333328068256378f;
  vfloat small = x + x * z * p;
  vfloat e = exp2(magnitude * (-2.0f * kLog2e));
  vfloat large = (1.0f - e) / (1.0f + e);
  large = x < broadcast(0.0f) ? -large : large;
  return magnitude < broadcast(0.625f) ? small : large;
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
