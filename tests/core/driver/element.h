// Rounds numbers to float32, float16 or bfloat16, and reads and writes them in memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "forward.h"

namespace flashattn::driver {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Format {
  size_t bytes;
  int precision;       // bits of the significand
  int smallest_place;  // the smallest positive number is 2 to this power
};
inline const Format& format(Dtype dtype) {
  static const Format formats[] = {{4, 24, -149}, {2, 11, -24}, {2, 8, -133}};
  return formats[static_cast<int>(dtype)];
}

inline double last_place(double x, Dtype dtype) {
  int exponent;
  std::frexp(x, &exponent);
  return std::ldexp(1, std::max(exponent - format(dtype).precision, format(dtype).smallest_place));
}

inline double rounded(double x, Dtype dtype) {
  return std::isfinite(x) ? std::nearbyint(x / last_place(x, dtype)) * last_place(x, dtype) : x;
}

// x must be a number that the dtype holds exactly.
inline void write_element(double x, Dtype dtype, uint8_t* target) {
  uint32_t bits;
  float as_float = static_cast<float>(x);
  std::memcpy(&bits, &as_float, sizeof(bits));
  if (dtype == Dtype::float32) {
    std::memcpy(target, &bits, 4);
    return;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);  // bfloat16 is float32's upper half
  if (dtype == Dtype::float16) {
    uint32_t magnitude = 0x7e00;  // NaN
    if (std::isinf(x)) {
      magnitude = 0x7c00;
    } else if (std::abs(x) < 0x1p-14) {
      magnitude = static_cast<uint32_t>(std::abs(x) * 0x1p24);
    } else if (std::isfinite(x)) {
      int exponent = std::ilogb(x);
      magnitude = static_cast<uint32_t>((std::ldexp(std::abs(x), -exponent) - 1 + exponent + 15) * 1024);
    }
    half = static_cast<uint16_t>((std::signbit(x) ? 0x8000u : 0u) | magnitude);
  }
  std::memcpy(target, &half, 2);
}

inline double read_element(Dtype dtype, const uint8_t* source) {
  uint32_t bits = 0;
  std::memcpy(&bits, source, format(dtype).bytes);
  if (dtype == Dtype::float16) {
    int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
    double magnitude = exponent == 31  ? (fraction ? kNaN : kInf)
                       : exponent == 0 ? fraction * 0x1p-24
                                       : std::ldexp(1024 + fraction, exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
  }
  if (dtype == Dtype::bfloat16) bits <<= 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return static_cast<double>(x);
}

}  // namespace flashattn::driver
