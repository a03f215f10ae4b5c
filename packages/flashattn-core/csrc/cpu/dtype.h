// Converts float, half_t and bfloat_t to float and back. Loading is exact. Storing rounds to nearest, ties to even, as
// MLX's casts do. So a 16-bit result equals that of casting to float32, computing and casting back.
//
// The templates take one number or a vector: F is float or vfloat, and U is the unsigned type of F's bits.
#pragma once

#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

struct half_t {
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};
typedef uint16_t vushort __attribute__((vector_size(kWidth * sizeof(uint16_t))));

// Widens each 16-bit lane to 32 bits. Uses intrinsics, because GCC's own code converts the vector in two halves.
FLASHATTN_INLINE vuint widen(vushort v) {
#if defined(__AVX512F__)
  // With the unmasked intrinsic, GCC 12 warns about an undefined operand in its own header.
  return reinterpret_cast<vuint>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<vuint>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, vuint);
#endif
}

// Widens each byte to a 32-bit lane.
typedef uint8_t vbyte __attribute__((vector_size(kWidth)));
FLASHATTN_INLINE vint widen(vbyte v) {
#if defined(__AVX512F__)
  return reinterpret_cast<vint>(_mm512_maskz_cvtepu8_epi32(0xffff, reinterpret_cast<__m128i>(v)));
#elif defined(__AVX2__)
  int64_t bytes;
  __builtin_memcpy(&bytes, &v, sizeof(bytes));
  return reinterpret_cast<vint>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes)));
#else
  return __builtin_convertvector(v, vint);
#endif
}

template <typename To, typename From>
FLASHATTN_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// The last argument only selects the overload for a storage type.
template <typename F, typename U>
FLASHATTN_INLINE F decode(U bits, bfloat_t) {
  return bit_cast<F>(bits << 16);
}
template <typename F, typename U>
FLASHATTN_INLINE F decode(U bits, half_t) {
  U sign = (bits & 0x8000u) << 16;
  U magnitude = bits & 0x7fffu;
  // After the shift the number is too small by a factor of 2^112. The product is exact, also for subnormal numbers.
  U finite = bit_cast<U>(bit_cast<F>(magnitude << 13) * 0x1p112f);
  U special = (magnitude << 13) | 0x7f800000u;  // inf and NaN keep their mantissa
  return bit_cast<F>(sign | (magnitude >= 0x7c00u ? special : finite));
}

// Returns the 16 bits to store, in the lower half of U.
template <typename U, typename F>
FLASHATTN_INLINE U encode(F x, bfloat_t) {
  U bits = bit_cast<U>(x);
  U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  U nan = (bits >> 16) | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}
template <typename U, typename F>
FLASHATTN_INLINE U encode(F x, half_t) {
  U bits = bit_cast<U>(x);
  U sign = (bits >> 16) & 0x8000u;
  U magnitude = bits & 0x7fffffffu;
  // Below 2^-14, half_t has steps of 2^-24, as floats from 0.5 to 1 have. So adding 0.5 rounds to a multiple of 2^-24.
  U small = bit_cast<U>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000u;
  U normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  U large = magnitude > 0x7f800000u ? U{} + 0x7e00u : U{} + 0x7c00u;  // NaN, infinity
  U half = magnitude < 0x38800000u ? small : normal;
  return sign | (magnitude >= 0x477ff000u ? large : half);  // 65520 and more rounds to infinity
}

FLASHATTN_INLINE float to_float(float x) {
  return x;
}
template <typename T>
FLASHATTN_INLINE float to_float(T x) {
  return decode<float>(uint32_t{x.bits}, T{});
}
FLASHATTN_INLINE void from_float(float x, float* out) {
  *out = x;
}
template <typename T>
FLASHATTN_INLINE void from_float(float x, T* out) {
  out->bits = static_cast<uint16_t>(encode<uint32_t>(x, T{}));
}

template <typename T>
FLASHATTN_INLINE vfloat load(const T* p) {
  vushort bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return decode<vfloat>(widen(bits), T{});
}
#if defined(__AVX2__)
// One instruction, where decode() takes ten.
FLASHATTN_INLINE vfloat load(const half_t* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
}
#endif
template <typename T>
FLASHATTN_INLINE void store(T* p, vfloat v) {
  vushort bits = __builtin_convertvector(encode<vuint>(v, T{}), vushort);
  __builtin_memcpy(p, &bits, sizeof(bits));
}

// Loads kWidth elements of a row from `first` on. The row has `count` elements; lanes beyond its end are 0.
template <typename T>
FLASHATTN_INLINE vfloat load_part(const T* row, int64_t stride, int first, int count) {
  if (stride == 1 && first + kWidth <= count) {
    return load(row + first);
  }
  float part[kWidth] = {};
  for (int i = first; i < smaller(first + kWidth, count); ++i) part[i - first] = to_float(row[i * stride]);
  return load(part);
}
template <typename T>
FLASHATTN_INLINE void store_part(T* row, int64_t stride, int first, int count, vfloat v) {
  if (stride == 1 && first + kWidth <= count) {
    return store(row + first, v);
  }
  float part[kWidth];
  store(part, v);
  for (int i = first; i < smaller(first + kWidth, count); ++i) from_float(part[i - first], &row[i * stride]);
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
