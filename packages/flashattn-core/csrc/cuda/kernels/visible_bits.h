// Reads mask arrays for a tile. A lane reads several bytes of a bool array at once and turns them into bits. Then the
// lanes exchange their bits. From an additive array, a lane reads two numbers at a time.
#pragma once

#include "visibility.h"

namespace flashattn {

// COUNT neighbouring bytes of a row of a bool array.
template <int COUNT>
struct alignas(COUNT) VisibleBytes {
  static_assert(COUNT == 4 || COUNT == 8 || COUNT == 16, "a load");
  uint words[COUNT / 4];

  // Reads the bytes from key `first` on. row: points to the byte for key 0. step: the stride from one key to the next.
  // Bytes beyond the last key are 0.
  FLASHATTN_FUNC void read(const bool* row, int64_t step, int first, int key_len) {
    const bool* from = row + first * step;
    if (step == 1 && first + COUNT <= key_len && reinterpret_cast<unsigned long long>(from) % COUNT == 0) {
      *this = *reinterpret_cast<const VisibleBytes*>(from);
    } else {
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT / 4; ++i) words[i] = 0;
      FLASHATTN_UNROLL
      for (int i = 0; i < COUNT; ++i) {
        if (first + i < key_len) words[i / 4] |= uint(from[i * step]) << i % 4 * 8;
      }
    }
  }
  // Bit n of the result tells whether byte n is not 0. The multiplication moves bits 7, 15, 23 and 31 of a word to the
  // top four.
  FLASHATTN_FUNC uint bits() const {
    uint result = 0;
    FLASHATTN_UNROLL
    for (int i = 0; i < COUNT / 4; ++i) {
      uint high = ((words[i] & 0x7f7f7f7f) + 0x7f7f7f7f | words[i]) & 0x80808080;
      result |= high * 0x204081 >> 28 << i * 4;
    }
    return result;
  }
};

// Bit n of the result tells whether key first_key + n is inside the span.
FLASHATTN_FUNC uint bits_of_span(KeySpan span, int first_key) {
  const auto below = [first_key](int key) {
    int n = clamped(key - first_key, 0, 32);
    return n == 32 ? ~0u : (1u << n) - 1;
  };
  return below(span.end) & ~below(span.begin);
}

// Tells which of a lane's scores in a tile are visible. operator[](i) returns this for element i % 4 of fragment i / 4.
// read() starts to load the bool array's bytes, and take() waits for them. All lanes of a warp must call both, with
// other work in between to hide the latency. OF_KEYS: if true, the fragments' rows are keys and their COLUMNS columns
// are queries. If false, rows are queries and columns are keys.
template <bool OF_KEYS, int COLUMNS>
struct VisibleBits;

// Rows are queries. A bit is set if the key is in the row's span and the bool array shows it.
template <int KEYS>
struct VisibleBits<false, KEYS> {
  static constexpr int kWords = (KEYS + 31) / 32, kOwn = KEYS / 4;
  VisibleBytes<kOwn> bytes[2];  // a lane reads the bytes of kOwn keys in each of its two rows
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

// Rows are keys, and columns are queries of one head. A bit is set if the bool array shows the key. Spans are ignored.
template <int QUERIES>
struct VisibleBits<true, QUERIES> {
  static constexpr int kWords = QUERIES < 32 ? QUERIES / 4 : 8, kReads = (QUERIES + 31) / 32;
  VisibleBytes<16> bytes[kReads];
  uint words[kWords];  // one per query; bits 16 to 31 belong to the query 32 columns further right

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

// Whether bias_pair() may be called for the `count` keys from first_key on. Pairs must be aligned and contiguous.
FLASHATTN_FUNC bool has_bias_pairs(Visibility visibility, int first_key, int count) {
  const Strides& strides = visibility.params->bias;
  auto begin = reinterpret_cast<unsigned long long>(visibility.inputs.bias);
  return strides.column == 1 && (strides.row | strides.head) % 2 == 0 && begin % (2 * size_of_dtype(bias_dtype)) == 0 &&
         first_key + count <= visibility.params->key_len;
}
// The additive array's numbers for `key`, which must be even, and for the next key. A row beyond the last query gets
// the last query's numbers.
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

}  // namespace flashattn
