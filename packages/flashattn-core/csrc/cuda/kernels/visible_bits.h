// The bool array's entries for a tile, as bits: its bytes are read 16 at a time, and lanes exchange what each has read.
#pragma once

#include "visibility.h"

namespace flashattn {

// Bit n: whether byte n is not 0. The product moves bits 0, 8, 16 and 24 to the highest four; none of them meets
// another.
FLASHATTN_FUNC uint bits_of_word(uint word) {
  uint high = ((word & 0x7f7f7f7f) + 0x7f7f7f7f | word) & 0x80808080;
  return (high >> 7) * 0x10204080 >> 28;
}

// Bit n: what the array says of key `first` + n, COUNT keys of them; 0 where there is no key. row: from key 0 on.
template <int COUNT>
FLASHATTN_FUNC uint bits_of_row(const bool* row, int64_t step, int first, int key_len) {
  static_assert(COUNT == 4 || COUNT == 8 || COUNT == 16, "a load");
  const bool* from = row + first * step;
  uint result = 0;
  if (step == 1 && first + COUNT <= key_len && reinterpret_cast<unsigned long long>(from) % COUNT == 0) {
    if constexpr (COUNT == 16) {
      uint4 words = *reinterpret_cast<const uint4*>(from);
      result =
          bits_of_word(words.x) | bits_of_word(words.y) << 4 | bits_of_word(words.z) << 8 | bits_of_word(words.w) << 12;
    } else if constexpr (COUNT == 8) {
      uint2 words = *reinterpret_cast<const uint2*>(from);
      result = bits_of_word(words.x) | bits_of_word(words.y) << 4;
    } else {
      result = bits_of_word(*reinterpret_cast<const uint*>(from));
    }
  } else {
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      if (first + i < key_len) result |= uint(from[i * step]) << i;
    }
  }
  return result;
}

// Where there is no such array.
struct AllVisible {
  FLASHATTN_FUNC bool operator[](int) const { return true; }
};

// Of a fragment's two rows, which are queries, and KEYS keys. Number i is that of fragment i / 4. By all lanes.
template <int KEYS>
struct BitsOfQueries {
  static constexpr int kWords = (KEYS + 31) / 32;
  uint words[2][kWords];

  FLASHATTN_FUNC BitsOfQueries(Visibility visibility, const Row (&rows)[2], int first_key, int lane) {
    constexpr int kOwn = KEYS / 4;  // keys that a lane reads of each row
    const AttentionParams& params = *visibility.params;
    int own = lane % 4;
    FLASHATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      const bool* row = visibility.visible_row(rows[h].head, minimum(rows[h].query, params.query_len - 1));
      uint bits = bits_of_row<kOwn>(row, params.visible.column, first_key + own * kOwn, params.key_len);
      bits <<= own * kOwn % 32;
      bits |= __shfl_xor_sync(~0u, bits, 1);
      uint others = __shfl_xor_sync(~0u, bits, 2);
      if constexpr (kWords == 1) {
        words[h][0] = bits | others;
      } else {
        words[h][0] = own < 2 ? bits : others;
        words[h][1] = own < 2 ? others : bits;
      }
      FLASHATTN_UNROLL
      for (int w = 0; w < kWords; ++w) words[h][w] >>= own * 2;
    }
  }
  FLASHATTN_FUNC bool operator[](int i) const { return words[i % 4 / 2][i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1; }
};

// The same where a fragment's rows are keys, and QUERIES queries of a head are its columns.
template <int QUERIES>
struct BitsOfKeys {
  static constexpr int kWords = QUERIES < 32 ? QUERIES / 4 : 8;
  uint words[kWords];  // of a lane's queries, and of those 32 further

  FLASHATTN_FUNC BitsOfKeys(Visibility visibility, int head, int first_query, int first_key, int lane) {
    const AttentionParams& params = *visibility.params;
    uint bits = 0;
    FLASHATTN_UNROLL
    for (int n = 0; n < QUERIES; n += 32) {
      int query = minimum(first_query + n + lane % QUERIES, params.query_len - 1);
      bits |= bits_of_row<16>(visibility.visible_row(head, query), params.visible.column, first_key, params.key_len)
              << n / 2;
    }
    FLASHATTN_UNROLL
    for (int n = 0; n < kWords; ++n) words[n] = __shfl_sync(~0u, bits, n / 2 * 8 + lane % 4 * 2 + n % 2) >> lane / 4;
  }
  FLASHATTN_FUNC bool operator[](int i) const {
    return words[i / 4 % 4 * 2 + i % 2] >> (i % 4 / 2 * 8 + i / 16 * 16) & 1;
  }
};

}  // namespace flashattn
