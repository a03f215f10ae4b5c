// Reads mask arrays for a tile. Lanes read 16 bytes of a bool array at a time, turn them into bits, and exchange these.
// They read an additive array two numbers at a time.
#pragma once

#include "visibility.h"

namespace flashattn {

// Bit n of the result: whether byte n is not 0. The multiplication moves bits 7, 15, 23 and 31 to the top four without
// collisions.
FLASHATTN_FUNC uint bits_of_word(uint word) {
  uint high = ((word & 0x7f7f7f7f) + 0x7f7f7f7f | word) & 0x80808080;
  return high * 0x204081 >> 28;
}

// COUNT bytes of a row, from some key on.
template <int COUNT>
struct VisibleBytes {
  static_assert(COUNT == 4 || COUNT == 8 || COUNT == 16, "a load");
  uint words[COUNT / 4];

  // row: points to key 0. Bytes beyond the last key are 0.
  FLASHATTN_FUNC void read(const bool* row, int64_t step, int first, int key_len) {
    const bool* from = row + first * step;
    if (step == 1 && first + COUNT <= key_len && reinterpret_cast<unsigned long long>(from) % COUNT == 0) {
      if constexpr (COUNT == 16) {
        uint4 four = *reinterpret_cast<const uint4*>(from);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
      } else if constexpr (COUNT == 8) {
        uint2 two = *reinterpret_cast<const uint2*>(from);
        words[0] = two.x, words[1] = two.y;
      } else {
        words[0] = *reinterpret_cast<const uint*>(from);
      }
    } else {
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT / 4; ++i) words[i] = 0;
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        if (first + i < key_len) words[i / 4] |= uint(from[i * step]) << i % 4 * 8;
      }
    }
  }
  // Bit n stands for byte n.
  FLASHATTN_FUNC uint bits() const {
    uint result = 0;
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT / 4; ++i) result |= bits_of_word(words[i]) << i * 4;
    return result;
  }
};

// Bit n: whether key first_key + n is inside the span.
FLASHATTN_FUNC uint bits_of_span(KeySpan span, int first_key) {
  const auto below = [first_key](int key) {
    int n = clamped(key - first_key, 0, 32);
    return n == 32 ? ~0u : (1u << n) - 1;
  };
  return below(span.end) & ~below(span.begin);
}

// Which of KEYS keys each of a fragment's two rows sees, by its span and by the bool array. The rows are queries; bit i
// belongs to fragment i / 4. read() requests the bytes and take() waits for them, so that other work fits in between.
// All lanes call both.
template <int KEYS>
struct BitsOfQueries {
  static constexpr int kWords = (KEYS + 31) / 32, kOwn = KEYS / 4;  // keys that a lane reads of each row
  VisibleBytes<kOwn> bytes[2];
  uint words[2][kWords];

  FLASHATTN_FUNC void read(Visibility visibility, const Row (&rows)[2], int first_key, int lane) {
    const AttentionParams& params = *visibility.params;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      const bool* row = visibility.visible_row(rows[h].head, minimum(rows[h].query, params.query_len - 1));
      bytes[h].read(row, params.visible.column, first_key + lane % 4 * kOwn, params.key_len);
    }
  }
  FLASHATTN_FUNC void take(const Row (&rows)[2], int first_key, int lane) {
    int own = lane % 4;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      uint bits = bytes[h].bits() << own * kOwn % 32;
      bits |= __shfl_xor_sync(~0u, bits, 1);
      uint others = __shfl_xor_sync(~0u, bits, 2);
      if constexpr (kWords == 1) {
        words[h][0] = bits | others;
      } else {
        words[h][0] = own < 2 ? bits : others;
        words[h][1] = own < 2 ? others : bits;
      }
      bool is_inside = rows[h].seen.contains(first_key, KEYS);
      FLASHATTN_UNROLL
      for (int w = 0; w < kWords; ++w) {
        if (!is_inside) words[h][w] &= bits_of_span(rows[h].seen, first_key + w * 32);
        words[h][w] >>= own * 2;
      }
    }
  }
  FLASHATTN_FUNC bool operator[](int i) const {
    return (words[i % 4 / 2][i / 16] & 1u << (i / 4 % 4 * 8 + i % 2)) != 0;
  }
};

// Like BitsOfQueries, but rows are keys, and columns QUERIES queries of a head. Only the bool array counts, not the
// spans.
template <int QUERIES>
struct BitsOfKeys {
  static constexpr int kWords = QUERIES < 32 ? QUERIES / 4 : 8, kReads = (QUERIES + 31) / 32;
  VisibleBytes<16> bytes[kReads];
  uint words[kWords];  // for a lane's queries, and for those 32 further

  FLASHATTN_FUNC void read(Visibility visibility, int head, int first_query, int first_key, int lane) {
    const AttentionParams& params = *visibility.params;
    FLASHATTN_UNROLL
    for (int n = 0; n < kReads; ++n) {
      int query = minimum(first_query + n * 32 + lane % QUERIES, params.query_len - 1);
      bytes[n].read(visibility.visible_row(head, query), params.visible.column, first_key, params.key_len);
    }
  }
  FLASHATTN_FUNC void take(int lane) {
    uint bits = 0;
    FLASHATTN_UNROLL
    for (int n = 0; n < kReads; ++n) bits |= bytes[n].bits() << n * 16;
    FLASHATTN_UNROLL
    for (int n = 0; n < kWords; ++n) words[n] = __shfl_sync(~0u, bits, n / 2 * 8 + lane % 4 * 2 + n % 2) >> lane / 4;
  }
  FLASHATTN_FUNC bool operator[](int i) const {
    return (words[i / 4 % 4 * 2 + i % 2] & 1u << (i % 4 / 2 * 8 + i / 16 * 16)) != 0;
  }
};

// Whether the numbers of an additive array for two neighbouring keys, the first even, can be loaded together, for all
// of `count` keys.
FLASHATTN_FUNC bool has_bias_pairs(Visibility visibility, int first_key, int count) {
  const Strides& strides = visibility.params->bias;
  auto begin = reinterpret_cast<unsigned long long>(visibility.inputs.bias);
  return strides.column == 1 && (strides.row | strides.head) % 2 == 0 && begin % (2 * size_of_dtype(bias_dtype)) == 0 &&
         first_key + count <= visibility.params->key_len;
}
// A row beyond the last query gets the last query's numbers.
FLASHATTN_FUNC float2 bias_pair(Visibility visibility, Row row, int key) {
  int query = minimum(row.query, visibility.params->query_len - 1);
  const uchar* from = visibility.inputs.bias + visibility.bias_offset(row.head, query, key) * size_of_dtype(bias_dtype);
  if (bias_dtype == 0) return *reinterpret_cast<const float2*>(from);
  uint pair = *reinterpret_cast<const uint*>(from);
  if (bias_dtype == 2) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  half low, high;
  low.bits = ushort(pair), high.bits = ushort(pair >> 16);
  return {float(low), float(high)};
}

// BitsOfKeys if a fragment's rows are keys, else BitsOfQueries.
template <bool OF_KEYS, int COLUMNS>
struct VisibleBits {
  using Bits = BitsOfQueries<COLUMNS>;
};
template <int COLUMNS>
struct VisibleBits<true, COLUMNS> {
  using Bits = BitsOfKeys<COLUMNS>;
};

}  // namespace flashattn
