// Elements of the three storage types to float and back. Loading is exact; storing rounds to nearest, ties
// to even, as MLX's casts do: so computing on bfloat16 equals "cast to float32, compute, cast back".
#pragma once

#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

struct half_t {
  uint16_t bits;
};
struct bfloat_t {
  uint16_t bits;
};

FLASHATTN_INLINE float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}
FLASHATTN_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

FLASHATTN_INLINE float to_float(float x) {
  return x;
}
FLASHATTN_INLINE float to_float(bfloat_t x) {
  return from_bits(uint32_t{x.bits} << 16);
}
FLASHATTN_INLINE float to_float(half_t x) {
  uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  uint32_t magnitude = x.bits & 0x7fffu;
  // Exponent and mantissa moved into place are off by 2^112; the product is exact, subnormals included.
  float finite = from_bits(magnitude << 13) * 0x1p112f;
  uint32_t special = (magnitude << 13) | 0x7f800000u;  // inf and NaN keep their mantissa
  return from_bits(sign | (magnitude >= 0x7c00u ? special : to_bits(finite)));
}

FLASHATTN_INLINE void from_float(float x, float* out) {
  *out = x;
}
FLASHATTN_INLINE void from_float(float x, bfloat_t* out) {
  uint32_t bits = to_bits(x);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  uint32_t nan = (bits >> 16) | 0x40u;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
FLASHATTN_INLINE void from_float(float x, half_t* out) {
  uint32_t bits = to_bits(x);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // 65520 and more rounds to infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 the spacing is 2^-24: adding 0.5, whose last place that is, rounds there.
    half = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
