// Attention over quantised keys and values. An element is scale * q + bias, with an integer q of 4 or 8 bits. A 16-bit
// float holds q exactly, so tensor cores multiply the integers. Scales and biases are applied in float32, once per
// group. No dequantised keys or values are written to memory.
//
//   score  = sum over groups of   scale * (query . q) + bias * (sum of the query's elements in the group)
//   output = sum over keys of     (probability * scale) q + probability * bias
//
// A tile of the tensor cores has 16 rows and 8 columns. Queries are its columns, because a decode step often has at
// most 8. The rows are keys in the first product, and columns of the values in the second. A lane has four
// neighbouring keys of a tile's 32, so it loads their scales at once.
#pragma once

#include "warp_rows.h"

namespace flashattn {

// In kernels without quantisation, quant_bits and group_size are 0. Other numbers replace them, to avoid division by 0.
constexpr int kBits = quant_bits == 0 ? 8 : quant_bits, kGroupSize = group_size == 0 ? 32 : group_size;
constexpr int kGroupBytes = group_dtype == 0 ? 4 : 2;
constexpr int kApart = 16 / kBits;      // how many quantised elements 16 bits hold
constexpr int kElements = 128 / kBits;  // elements in a piece of 16 bytes
FLASHATTN_FUNC constexpr int group_count(int columns) {
  return columns / kGroupSize;
}

// A shift and a bit mask turn an integer into a 16-bit float. The lowest kLinearBits bits of a float count multiples of
// the smallest positive float, if its other bits are 0. The integer is put into the highest of these bits. Tensor cores
// truncate the terms of a sum relative to the largest exponent. Such a float loses nothing, because it has the lowest
// exponent.
template <typename T>
constexpr int kLinearBits = 8;  // for bfloat: multiples of 2^-133
template <>
constexpr int kLinearBits<half> = 11;  // multiples of 2^-24
// integers() turns an integer q into q * 2^-kUnit. To avoid underflow, the other operand of the product is multiplied
// by 2^kRaised.
template <typename T>
constexpr int kRaised = 64;
template <>
constexpr int kRaised<half> = 0;
template <typename T>
constexpr int kUnit = 133 - kLinearBits<bfloat> + kBits;
template <>
constexpr int kUnit<half> = 24 - kLinearBits<half> + kBits;

FLASHATTN_FUNC constexpr float power_of_two(int n) {
  return n == 0 ? 1.0f : n > 0 ? 2.0f * power_of_two(n - 1) : 0.5f * power_of_two(n + 1);
}

// Takes element e from each 16-bit half of a word. Returns both elements as 16-bit floats, times 2^-kUnit.
template <typename T>
FLASHATTN_FUNC uint integers(uint word, int e) {
  constexpr int kUp = kLinearBits<T> - kBits;
  constexpr uint kMask = ((1u << kBits) - 1) << kUp;
  int down = e * kBits - kUp;
  return (down < 0 ? word << -down : word >> down) & (kMask | kMask << 16);
}

constexpr int kIntegerKeys = 32;  // keys per tile
// ldmatrix gives row n of each of four matrices to lanes 4 n to 4 n + 3. These lanes compute keys 4 n to 4 n + 3. So
// the tile stores key 4 n + m as row n of matrix m.
FLASHATTN_FUNC uint key_of_row(uint row) {
  return row % 8 * 4 + row / 8;
}

// The packed words of a tile's keys or values, in pieces of 16 bytes. The swizzle puts piece c of 8 successive rows
// into different banks.
template <int COLUMNS>
struct WordTile {
  static constexpr int kPieces = COLUMNS / kElements;
  static constexpr int kPitch = kPieces > 8 ? (kPieces + 7) / 8 * 8 : kPieces > 4 ? 8 : kPieces > 2 ? 4 : kPieces;
  static constexpr int kBytes = kIntegerKeys * kPitch * 16;

  uint memory;  // the tile's address

  static FLASHATTN_FUNC uint swizzle(uint row) { return row * kPitch / 8 % minimum(kPitch, 8); }
  FLASHATTN_FUNC uint piece(uint row, uint c) const { return memory + (row * kPitch + (c ^ swizzle(row))) * 16; }

  // Loads the words of up to `count` keys from key `first` on, and zeros for the tile's other keys. All THREADS threads
  // call load(). WIDE: the rows are contiguous and begin at a multiple of 16 bytes.
  template <int THREADS, bool WIDE>
  FLASHATTN_FUNC void load(const uint* words, RowLayout layout, int first, int count, uint thread) const {
    int row = thread / kPitch, c = thread % kPitch, key = key_of_row(row);
    const uint* own = words + (key * kPieces + c) * 4;
    uint own_piece = piece(row, c);
    if (kPieces < kPitch && c >= kPieces) return;
    FLASHATTN_UNROLL
    for (int n = 0; n < kIntegerKeys * kPitch; n += THREADS) {
      if (kIntegerKeys * kPitch < THREADS && row >= kIntegerKeys) return;
      // This step copies row `row` + `rows` of the tile, which holds key `key` + `keys`. `row` and `rows` have no bit
      // in common, so their sum is their XOR. The same holds for `key` and `keys`.
      int rows = n / kPitch, keys = key_of_row(rows);
      uint to = (own_piece ^ swizzle(rows) * 16) + rows * kPitch * 16;
      bool exists = count >= kIntegerKeys || key + keys < count;
      if constexpr (WIDE) {
        copy_async(to, own + int64_t(first) * (kPieces * 4) + keys * kPieces * 4, exists ? 16 : 0);
      } else {
        FLASHATTN_UNROLL
        for (int i = 0; i < 4; ++i) {
          static_cast<uint*>(shared_pointer(to))[i] = exists ? words[layout.offset(first + key + keys, c * 4 + i)] : 0;
        }
      }
    }
  }
};

// The scales, or the biases, of a tile's keys or values.
template <int GROUPS>
struct GroupTile {
  static constexpr int kRow = GROUPS * kGroupBytes, kBytes = kIntegerKeys * kRow;
  struct Quad {  // the scales, or the biases, of four neighbouring keys
    uint words[kRow];

    FLASHATTN_FUNC float of(int key, int g) const {
      int i = key * GROUPS + g;
      if (group_dtype == 0) return __uint_as_float(words[i]);
      uint bits = i % 2 == 0 ? words[i / 2] & 0xffff : words[i / 2] >> 16;
      if (group_dtype == 2) return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000);
      half number;
      number.bits = ushort(bits);
      return float(number);
    }
  };

  uint memory;  // the tile's address

  // WordTile::load() describes the arguments.
  template <int THREADS, bool WIDE>
  FLASHATTN_FUNC void load(const uchar* groups, RowLayout layout, int first, int count, int thread) const {
    if constexpr (WIDE) {
      FLASHATTN_UNROLL
      for (int n = 0; n < kBytes; n += THREADS * 16) {
        int at = n + thread * 16;
        if (at < kBytes) {
          int bytes = count >= kIntegerKeys ? 16 : clamped(count * kRow - at, 0, 16);
          copy_async(memory + at, groups + at + int64_t(first) * kRow, bytes);
        }
      }
    } else {
      FLASHATTN_ROLLED
      for (int at = thread; at < kIntegerKeys * GROUPS; at += THREADS) {
        bool exists = at / GROUPS < count;
        int64_t offset = exists ? layout.offset(first + at / GROUPS, at % GROUPS) : 0;
        void* to = shared_pointer(memory + at * kGroupBytes);
        if (kGroupBytes == 4) {
          *static_cast<uint*>(to) = exists ? reinterpret_cast<const uint*>(groups)[offset] : 0;
        } else {
          *static_cast<ushort*>(to) = exists ? reinterpret_cast<const ushort*>(groups)[offset] : 0;
        }
      }
    }
  }

  // Reads the scales, or the biases, of the lane's four keys.
  FLASHATTN_FUNC Quad quad(int lane) const {
    Quad result;
    FLASHATTN_UNROLL
    for (int i = 0; i < kRow; i += 2) {
      uint2 two = *static_cast<const uint2*>(shared_pointer(memory + lane / 4 * 4 * kRow + i * 4));
      result.words[i] = two.x;
      result.words[i + 1] = two.y;
    }
    return result;
  }
};

template <int COLUMNS>
struct IntegerTile {
  using Words = WordTile<COLUMNS>;
  using Groups = GroupTile<group_count(COLUMNS)>;
  static constexpr int kBytes = Words::kBytes + 2 * Groups::kBytes;

  Words words;
  Groups scales, biases;

  FLASHATTN_FUNC static IntegerTile at(uint memory) {
    return {{memory}, {memory + Words::kBytes}, {memory + Words::kBytes + Groups::kBytes}};
  }
  template <int THREADS, bool WIDE>
  FLASHATTN_FUNC void load(const QuantisedRows& rows, int first, int count, uint thread) const {
    words.template load<THREADS, WIDE>(rows.words, rows.word_layout, first, count, thread);
    scales.template load<THREADS, WIDE>(rows.scales, rows.scale_layout, first, count, thread);
    biases.template load<THREADS, WIDE>(rows.biases, rows.bias_layout, first, count, thread);
  }
  // Whether load() may be called with WIDE.
  static FLASHATTN_FUNC bool is_wide(const QuantisedRows& rows) {
    const auto in_a_row = [](RowLayout layout, int columns) {  // the stride of a single column does not matter
      return layout.row == columns && (layout.column == 1 || columns == 1);
    };
    constexpr int kGroups = group_count(COLUMNS);
    auto begins = reinterpret_cast<unsigned long long>(rows.words) | reinterpret_cast<unsigned long long>(rows.scales) |
                  reinterpret_cast<unsigned long long>(rows.biases);
    return begins % 16 == 0 && in_a_row(rows.word_layout, COLUMNS * kBits / 32) &&
           in_a_row(rows.scale_layout, kGroups) && in_a_row(rows.bias_layout, kGroups);
  }
};

// Specialises CopiedTiles (shared_tile.h) for quantised keys and values. A tile's first key is a multiple of
// kIntegerKeys.
template <int D, int DV, int STAGES, int THREADS>
struct CopiedTiles<uint, kIntegerKeys, D, DV, STAGES, THREADS> {
  using Keys = IntegerTile<D>;
  using Values = IntegerTile<DV>;
  static constexpr int kStage = (Keys::kBytes + Values::kBytes + 127) / 128 * 128, kBytes = STAGES * kStage;

  uint memory;
  QuantisedRows key_rows;
  QuantisedRows value_rows;
  uint thread;  // the thread's index among the copying threads

  FLASHATTN_FUNC Keys keys(int n) const { return Keys::at(memory + n % STAGES * kStage); }
  FLASHATTN_FUNC Values values(int n) const { return Values::at(memory + n % STAGES * kStage + Keys::kBytes); }

  FLASHATTN_FUNC void load(int n, int first, int end) const {
    if (first >= end) return;
    if (Keys::is_wide(key_rows) && Values::is_wide(value_rows)) {
      if (end - first >= kIntegerKeys) {
        load_rows<true>(n, first, kIntegerKeys);
      } else {
        load_rows<true>(n, first, end - first);
      }
    } else {
      load_rows<false>(n, first, end - first);
    }
  }

 private:
  template <bool WIDE>
  FLASHATTN_FUNC void load_rows(int n, int first, int count) const {
    keys(n).template load<THREADS, WIDE>(key_rows, first, count, thread);
    values(n).template load<THREADS, WIDE>(value_rows, first, count, thread);
  }
};

// Specialises AttendingRows (warp_rows.h) for quantised keys and values. In every 8 rows, lane n has two rows, from 2
// (n % 4) on. In a tile, lane n has four keys, from 4 (n / 4) on. Queries are in registers.
template <typename T, int ROWS, int D, int DV>
struct AttendingRows<T, uint, ROWS, D, DV, kIntegerKeys>
    : LaneRows<AttendingRows<T, uint, ROWS, D, DV, kIntegerKeys>, ROWS / 4, 8, 4> {
  static constexpr int kBlocks = ROWS / 8, kOwn = ROWS / 4;
  static constexpr float kScoreUnit = power_of_two(kUnit<T> - kRaised<T>), kBelowMax = kRaised<bfloat>;
  static constexpr int kPitch = DV + 4, kGroups = group_count(D), kValueGroups = group_count(DV);
  static constexpr int kPieces = D / kElements, kPiecesOfGroup = kGroupSize / kElements;
  using Scores = Fragment[2][kBlocks];  // element i is for the lane's keys 2 i and 2 i + 1

  struct alignas(4 * kApart) Neighbours {  // neighbouring elements of a query
    uint pairs[kApart];

    FLASHATTN_FUNC float element(int n) const {
      T number;
      number.bits = ushort(pairs[n / 2] >> n % 2 * 16);
      return float(number);
    }
  };
  Neighbours read[kBlocks][kPieces];
  uint queries[kBlocks][kPieces][kApart];  // queries times 2^kRaised, as second operands of the tensor cores
  float query_sums[kOwn][kGroups];         // for each group: the sum of the query's elements, divided by kScoreUnit
  Fragment output[DV / 16][kBlocks] = {};
  float bias_sums[kOwn][kValueGroups] = {};  // the sum of all terms without q over the lane's keys, see add_values()

  static FLASHATTN_FUNC int own_row(int h, int lane) { return h / 2 * 8 + lane % 4 * 2 + h % 2; }

  // Starts to load the queries, which take_queries() then converts. Between these two calls, the block requests its
  // first tiles. row_at(row) must point to a readable row even if `row` is beyond the last one.
  template <typename F>
  FLASHATTN_FUNC void read_queries(F row_at, int64_t step, int lane) {
    FLASHATTN_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const T* from = row_at(b * 8 + lane / 4) + lane % 4 * 2 * kApart * step;
      if (step == 1 && reinterpret_cast<unsigned long long>(from) % sizeof(Neighbours) == 0) {
        FLASHATTN_UNROLL
        for (int c = 0; c < kPieces; ++c) read[b][c] = *reinterpret_cast<const Neighbours*>(from + c * 8 * kApart);
      } else {
        FLASHATTN_UNROLL
        for (int i = 0; i < kPieces * kApart; ++i) {
          const T* pair = from + (i / kApart * 4 * kApart + i % kApart) * 2 * step;
          read[b][i / kApart].pairs[i % kApart] = pair[0].bits | uint(pair[step].bits) << 16;
        }
      }
    }
  }
  FLASHATTN_FUNC void take_queries(int lane) {
    FLASHATTN_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      FLASHATTN_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        float sum = 0;
        FLASHATTN_UNROLL
        for (int i = 0; i < kPiecesOfGroup * kApart; ++i) {
          int c = g * kPiecesOfGroup + i / kApart, e = i % kApart;
          float low = read[b][c].element(e), high = read[b][c].element(e + kApart);
          queries[b][c][e] = rounded_pair<T>(low * power_of_two(kRaised<T>), high * power_of_two(kRaised<T>));
          sum += low + high;
        }
        sum = lane_sum<4>(sum) * power_of_two(kRaised<T> - kUnit<T>);
        FLASHATTN_UNROLL
        for (int i = 0; i < 2; ++i) query_sums[2 * b + i][g] = __shfl_sync(~0u, sum, (lane % 4 * 2 + i) * 4);
      }
    }
  }

  // Computes the dot products of the warp's queries with the tile's keys, divided by kScoreUnit.
  FLASHATTN_FUNC void multiply_keys(Scores& scores, IntegerTile<D> keys, int lane) const {
    auto scales = keys.scales.quad(lane), biases = keys.biases.quad(lane);
    FLASHATTN_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      Fragment products[2][kBlocks] = {};
      FLASHATTN_UNROLL
      for (int c = g * kPiecesOfGroup; c < (g + 1) * kPiecesOfGroup; ++c) {
        uint words[4];
        load_matrices(words, keys.words.piece(lane, c));
        FLASHATTN_UNROLL
        for (int e = 0; e < kApart; e += 2) {
          FLASHATTN_UNROLL
          for (int i = 0; i < 2; ++i) {
            uint a[4] = {integers<T>(words[2 * i], e), integers<T>(words[2 * i + 1], e),
                         integers<T>(words[2 * i], e + 1), integers<T>(words[2 * i + 1], e + 1)};
            FLASHATTN_UNROLL
            for (int b = 0; b < kBlocks; ++b) {
              multiply_add_tile<T>(products[i][b], a, queries[b][c][e], queries[b][c][e + 1]);
            }
          }
        }
      }
      for_each(products, [&](float& product, int h, int key) {
        float& score = at(scores, key, h);
        score = multiply_add(biases.of(key, g), query_sums[h][g], g == 0 ? 0.0f : score);
        score = multiply_add(scales.of(key, g), product, score);
      });
    }
  }

  template <int PARTS, typename Tiles>
  FLASHATTN_FUNC void attend(const Tiles& tiles, int n, Visibility visibility, int first_key, bool unmasked, int lane) {
    Scores scores;
    multiply_keys(scores, tiles.keys(n), lane);
    rescale(this->to_probabilities(scores, visibility, first_key, unmasked, lane));
    add_values(scores, tiles.values(n), lane);
  }

  FLASHATTN_FUNC void rescale(Rescaling<kOwn> rescaling) {
    if (!rescaling.needed) return;
    FLASHATTN_UNROLL
    for (int h = 0; h < kOwn; ++h) {
      FLASHATTN_UNROLL
      for (int c = 0; c < DV / 8; ++c) output[c / 2][h / 2][c % 2 * 2 + h % 2] *= rescaling.by[h];
      FLASHATTN_UNROLL
      for (int g = 0; g < kValueGroups; ++g) bias_sums[h][g] *= rescaling.by[h];
    }
  }

  // output += probabilities @ values. The operands are always bfloat, because probability * scale may underflow in
  // half. Each probability * scale is split into two bfloat parts and a small rest. Tensor cores multiply the two parts
  // by q. The rest is multiplied by the mean of all possible q instead.
  FLASHATTN_FUNC void add_values(const Scores& probabilities, IntegerTile<DV> values, int lane) {
    constexpr float kMean = ((1 << kBits) - 1) / 2.0f;
    auto scales = values.scales.quad(lane), biases = values.biases.quad(lane);
    FLASHATTN_UNROLL
    for (int g = 0; g < kValueGroups; ++g) {
      uint parts[4][kBlocks][2];
      FLASHATTN_UNROLL
      for (int key = 0; key < 4; ++key) {
        float scale = scales.of(key, g), bias = biases.of(key, g);
        FLASHATTN_UNROLL
        for (int b = 0; b < kBlocks; ++b) {
          const float* p = &probabilities[key / 2][b][key % 2 * 2];
          float low = p[0] * scale, high = p[1] * scale;
          split_pair<bfloat>(low, high, parts[key][b]);
          FLASHATTN_UNROLL
          for (int part = 0; part < 2; ++part) parts[key][b][part] = transposed(parts[key][b][part]);
          float& sum = bias_sums[2 * b][g];
          float& next = bias_sums[2 * b + 1][g];
          sum = multiply_add(p[0], bias, multiply_add(low, kMean, sum));
          next = multiply_add(p[1], bias, multiply_add(high, kMean, next));
        }
      }
      FLASHATTN_UNROLL
      for (int c = g * kPiecesOfGroup; c < (g + 1) * kPiecesOfGroup; ++c) {
        uint words[4];
        load_matrices_transposed(words, values.words.piece(lane, c));
        FLASHATTN_UNROLL
        for (int e = 0; e < kApart; e += 2) {
          FLASHATTN_UNROLL
          for (int i = 0; i < 2; ++i) {
            uint a[4] = {integers<bfloat>(words[2 * i], e), integers<bfloat>(words[2 * i], e + 1),
                         integers<bfloat>(words[2 * i + 1], e), integers<bfloat>(words[2 * i + 1], e + 1)};
            FLASHATTN_UNROLL
            for (int b = 0; b < kBlocks; ++b) {
              FLASHATTN_UNROLL
              for (int part = 0; part < 2; ++part) {
                multiply_add_tile<bfloat>(output[(c * kApart + e) / 2][b], a, parts[2 * i][b][part],
                                          parts[2 * i + 1][b][part]);
              }
            }
          }
        }
      }
    }
  }

  // Must be called after the last tile. Undoes the factor 2^-kUnit of integers(), and adds the biases. Multiplies the
  // output by from_max, and then sets from_max to 1.
  FLASHATTN_FUNC void finish(Visibility visibility) {
    LaneRows<AttendingRows, kOwn, 8, 4>::finish(visibility);
    FLASHATTN_UNROLL
    for (int h = 0; h < kOwn; ++h) {
      float from_max = this->from_max[h];
      this->from_max[h] = 1;
      FLASHATTN_UNROLL
      for (int g = 0; g < kValueGroups; ++g) {
        float bias = lane_sum<8, 4>(bias_sums[h][g]) * from_max;
        FLASHATTN_UNROLL
        for (int i = 0; i < kGroupSize / 8; ++i) {
          float& x = output[(g * (kGroupSize / 8) + i) / 2][h / 2][i % 2 * 2 + h % 2];
          x = multiply_add(x * power_of_two(kRaised<bfloat>), power_of_two(kUnit<bfloat> - kRaised<bfloat>) * from_max,
                           bias);
        }
      }
    }
  }

  FLASHATTN_FUNC void leave_row(float* row, int h, int lane) const {
    FLASHATTN_UNROLL
    for (int c = 0; c < DV / kElements; ++c) {
      FLASHATTN_UNROLL
      for (int e = 0; e < kApart; ++e) {
        row[(c * 8 + lane / 4) * kApart + e] = output[(c * kApart + e) / 2][h / 2][e % 2 * 2 + h % 2];
      }
    }
  }

  // LaneRows describes for_each(), mask() and highest().
  template <typename F>
  static FLASHATTN_FUNC void for_each(Scores& scores, int first_key, int lane, F function) {
    for_each(scores, [&](float& x, int h, int key) { function(x, h, first_key + lane / 4 * 4 + key); });
  }
  FLASHATTN_FUNC void mask(Scores& scores, Visibility visibility, int first_key, int lane) const {
    for_each(scores, first_key, lane, [&](float& x, int h, int key) { x = visibility.masked(x, this->rows[h], key); });
  }
  static FLASHATTN_FUNC float highest(const Scores& scores, int h) {
    return maximum(maximum(at(scores, 0, h), at(scores, 1, h)), maximum(at(scores, 2, h), at(scores, 3, h)));
  }

 private:
  // The lane's score for its row h and its key number `key`, from 0 to 3.
  template <typename Each>
  static FLASHATTN_FUNC auto& at(Each& scores, int key, int h) {
    return scores[key / 2][h / 2][key % 2 * 2 + h % 2];
  }
  // Calls function(score, row, key) for each of the lane's scores.
  template <typename F>
  static FLASHATTN_FUNC void for_each(Scores& scores, F function) {
    FLASHATTN_UNROLL
    for (int n = 0; n < 4 * kOwn; ++n) function(at(scores, n / kOwn, n % kOwn), n % kOwn, n / kOwn);
  }
};

}  // namespace flashattn
