// Decodes MLX's affine quantisation. Element i of a row is scale * q + bias, where q has `bits` bits. The row's words
// form one little-endian number, in which q begins at bit i * bits. scale and bias belong to group i / group_size.
#pragma once

#include "matmul.h"
#include "simd.h"

namespace flashattn::cpu::FLASHATTN_ISA {

// Calls visit(Count<bits>{}). `bits` is a number of bits to which MLX quantises.
template <typename Visit>
FLASHATTN_INLINE void with_bits(int bits, Visit visit) {
  with_count(bits, [&](auto count) {
    if constexpr (count.value != 7) visit(count);
  });
}

#if defined(__AVX2__)
// To decode a lane, a shuffle picks four bytes, from the first byte of the lane's q on. Then these bytes are shifted
// right by `shift` bits. `byte` has the indices of the picked bytes, at most 15, because a shuffle reads 16 bytes. With
// AVX2, four bytes have all lanes of up to 4 bits, so there is no shuffle.
template <int Bits>
struct Picks {
  alignas(64) uint8_t byte[4 * kWidth] = {};
  alignas(64) int32_t shift[kWidth] = {};
  constexpr Picks() {
    for (int i = 0; i < kWidth; ++i) {
      int first = kWidth * Bits <= 32 ? 0 : i * Bits / 8;
      for (int b = 0; b < 4; ++b) byte[4 * i + b] = static_cast<uint8_t>(smaller(first + b, 15));
      shift[i] = i * Bits - 8 * first;
    }
  }
};
#endif

#if defined(__AVX512F__)
// A table that converts a q of up to four bits to float. Its 16 numbers fit one vector. A shuffle that looks q up is
// faster than a conversion. The shuffle uses four bits of each lane. If q has fewer bits, the bits above q are
// arbitrary, so the table repeats.
template <int Bits>
struct Numbers {
  alignas(64) float q[16] = {};
  constexpr Numbers() {
    for (int i = 0; i < 16; ++i) q[i] = static_cast<float>(i % (1 << Bits));
  }
};
#endif

// Loads up to eight bytes, the first one into the lowest bits. The parts meet in a register: through memory, the
// processor would have to wait until they are stored.
template <int Bytes>
FLASHATTN_INLINE uint64_t load_bytes(const uint8_t* source) {
  constexpr int kPart = Bytes >= 8 ? 8 : Bytes >= 4 ? 4 : Bytes >= 2 ? 2 : 1;
  uint64_t bytes = 0;
  __builtin_memcpy(&bytes, source, kPart);
  if constexpr (kPart < Bytes) bytes |= load_bytes<Bytes - kPart>(source + kPart) << 8 * kPart;
  return bytes;
}

// Returns kWidth elements of one group from `first` on. `first` is a multiple of kWidth. Reads only the bytes with
// these elements.
template <int Bits>
FLASHATTN_INLINE vfloat dequantise(const uint8_t* row, int first, float scale, float bias) {
  constexpr int kBytes = (kWidth * Bits + 7) / 8;
  const uint8_t* source = row + first * Bits / 8;
#if defined(__AVX2__)
  static constexpr Picks<Bits> kPicks;
  uint64_t low = load_bytes<smaller(kBytes, 8)>(source), high = 0;
  if constexpr (kBytes > 8) high = load_bytes<kBytes - 8>(source + 8);
#endif
#if defined(__AVX512F__)
  if constexpr (Bits == 8) {
    __m128i bytes = _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
    return to_float(reinterpret_cast<vint>(_mm512_maskz_cvtepu8_epi32(0xffff, bytes))) * scale + bias;
  }
  __m512i bytes = kBytes > 8 ? _mm512_maskz_broadcast_i32x4(
                                   0xffff, _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low)))
                             : _mm512_set1_epi64(static_cast<int64_t>(low));
  __m512i words = _mm512_maskz_shuffle_epi8(~__mmask64{0}, bytes, _mm512_load_si512(kPicks.byte));
  words = _mm512_maskz_srlv_epi32(0xffff, words, _mm512_load_si512(kPicks.shift));
  if constexpr (Bits <= 4) {
    static constexpr Numbers<Bits> kNumbers;
    return _mm512_maskz_permutexvar_ps(0xffff, words, load(kNumbers.q) * scale + bias);
  }
  return to_float(reinterpret_cast<vint>(words) & ((1 << Bits) - 1)) * scale + bias;
#elif defined(__AVX2__)
  if constexpr (Bits == 8) {
    return to_float(reinterpret_cast<vint>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(low))))) *
               scale +
           bias;
  }
  __m256i words = _mm256_set1_epi32(static_cast<int32_t>(low));
  if constexpr (Bits > 4) {
    words = _mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<int64_t>(low)),
                                _mm256_load_si256(reinterpret_cast<const __m256i*>(kPicks.byte)));
  }
  words = _mm256_srlv_epi32(words, _mm256_load_si256(reinterpret_cast<const __m256i*>(kPicks.shift)));
  return to_float(reinterpret_cast<vint>(words) & ((1 << Bits) - 1)) * scale + bias;
#else
  static_assert(kWidth == 4, "four numbers, and up to 4 bits before them, fit 32 bits");
  uint32_t word = static_cast<uint32_t>(load_bytes<kBytes>(source));
  uint32_t start = static_cast<uint32_t>(first * Bits % 8);
  vuint words = {word >> start, word >> (start + Bits), word >> (start + 2 * Bits), word >> (start + 3 * Bits)};
  return to_float(reinterpret_cast<vint>(words & ((1u << Bits) - 1))) * scale + bias;
#endif
}

}  // namespace flashattn::cpu::FLASHATTN_ISA
