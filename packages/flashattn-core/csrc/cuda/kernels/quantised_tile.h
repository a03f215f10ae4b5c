// Tiles of quantised keys and values, as they lie in memory, and their products on the tensor cores. An element is
// scale * q + bias. Its integer q of 4 or 8 bits is exact in 16: so the tensor cores multiply integers, and scales and
// biases are multiplied in float32, once for a group. Nothing is written back that is not quantised.
//
//   score  = sum over groups of   scale * (query q) + bias * (sum of the query)
//   output = sum over keys of     (probability * scale) q + probability * bias
//
// What a lane loads of 16 bits are kApart<uint> neighbouring elements. Element e of each goes into the same product:
// there 8 columns are `kApart` apart. Queries are laid out alike, and the output's columns are, see output_column().
#pragma once

#include "tile_products.h"

namespace flashattn {

// Any, where nothing is quantised.
constexpr int kBits = quant_bits == 0 ? 8 : quant_bits, kGroupSize = group_size == 0 ? 32 : group_size;
constexpr int kGroupBytes = group_dtype == 0 ? 4 : 2;
template <>
constexpr int kApart<uint> = 16 / kBits;
FLASHATTN_FUNC constexpr int group_count(int columns) {
  return columns / kGroupSize;
}

// Integers become 16-bit floats by a mask: those below the normal numbers are multiples of the smallest of all. They
// are moved up as far as these go, since tensor cores cut sums off by the exponent, which is the lowest one's for all.
template <typename T>
constexpr int kLinearBits = 8;  // bfloat: multiples of 2^-133
template <>
constexpr int kLinearBits<half> = 11;  // of 2^-24
// Their unit is 2^-kUnit. Where that is too small for sums in float32, the other operand is 2^kRaised as large.
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

// Element e of both halves of a word, as two 16-bit floats in that unit.
template <typename T>
FLASHATTN_FUNC uint integers(uint word, int e) {
  constexpr int kUp = kLinearBits<T> - kBits;
  constexpr uint kMask = ((1u << kBits) - 1) << kUp;
  int down = e * kBits - kUp;
  return (down < 0 ? word << -down : word >> down) & (kMask | kMask << 16);
}

// Scales or biases of a tile's keys.
template <int KEYS, int GROUPS>
struct GroupTile {
  static constexpr int kRow = GROUPS * kGroupBytes, kBytes = KEYS * kRow;

  uint memory;  // its address

  // Brings those of the first `count` keys, and zeros for the others.
  template <int THREADS>
  FLASHATTN_FUNC void load(const uchar* from, RowLayout layout, int count, uint thread) const {
    if (packed_rows && reinterpret_cast<unsigned long long>(from) % 4 == 0) {
      FLASHATTN_UNROLL
      for (int n = 0; n < kBytes; n += THREADS * 4) {
        int at = n + int(thread) * 4;
        if (kBytes % (THREADS * 4) == 0 || at < kBytes) {
          copy_word_async(memory + at, from + at, clamped(count * kRow - at, 0, 4));
        }
      }
      return;
    }
    for (uint at = thread; at < KEYS * GROUPS; at += THREADS) {
      bool exists = int(at / GROUPS) < count;
      int64_t offset = exists ? layout.offset(at / GROUPS, at % GROUPS) : 0;
      void* to = shared_pointer(memory + at * kGroupBytes);
      if (kGroupBytes == 4) {
        *static_cast<uint*>(to) = exists ? reinterpret_cast<const uint*>(from)[offset] : 0;
      } else {
        *static_cast<ushort*>(to) = exists ? reinterpret_cast<const ushort*>(from)[offset] : 0;
      }
    }
  }

  // Of group g of key `even`, and of the next.
  FLASHATTN_FUNC float2 pair(int even, int g) const { return float2{element(even, g), element(even, GROUPS + g)}; }

 private:
  // Number i from key `even` on.
  FLASHATTN_FUNC float element(int even, int i) const {
    uint word = *static_cast<const uint*>(shared_pointer(memory + even * kRow + i * kGroupBytes / 4 * 4));
    if (group_dtype == 0) return __uint_as_float(word);
    uint bits = i % 2 == 0 ? word & 0xffff : word >> 16;
    if (group_dtype == 2) return __uint_as_float(bits << 16);
    half number;
    number.bits = ushort(bits);
    return float(number);
  }
};

// Keys, or their values. FIRST: where in the rows of their common tile they begin.
template <int KEYS, int COLUMNS, int FIRST>
struct QuantisedTile {
  static constexpr int kGroups = group_count(COLUMNS);
  static constexpr int kElements = 128 / kBits;  // of a piece
  static constexpr int kPiecesOfGroup = kGroupSize / kElements;
  using Words = SharedTile<uint, KEYS, COLUMNS * kBits / 32, FIRST>;
  using Groups = GroupTile<KEYS, kGroups>;
  static constexpr int kBytesOfGroups = 2 * Groups::kBytes;

  Words words;
  Groups scales, biases;

  template <int THREADS>
  FLASHATTN_FUNC void load(const QuantisedRows& rows, int count, uint thread) const {
    words.template load<THREADS>(rows.words, rows.word_layout, count, COLUMNS * kBits / 32, thread);
    scales.template load<THREADS>(rows.scales, rows.scale_layout, count, thread);
    biases.template load<THREADS>(rows.biases, rows.bias_layout, count, thread);
  }
};

// As those of shared_tile.h. The words of a key and of its value share a row.
template <int KEYS, int D, int DV, int STAGES, int THREADS>
struct CopiedTiles<uint, KEYS, D, DV, STAGES, THREADS> {
  using Keys = QuantisedTile<KEYS, D, 0>;
  using Values = QuantisedTile<KEYS, DV, D * kBits / 128>;
  static constexpr int kWords = Values::Words::kBytes;
  static constexpr int kStage = (kWords + Keys::kBytesOfGroups + Values::kBytesOfGroups + 127) / 128 * 128;
  static constexpr int kBytes = STAGES * kStage;

  uint memory;
  QuantisedRows key_rows;
  QuantisedRows value_rows;
  uint thread;  // among those that copy

  FLASHATTN_FUNC Keys keys(int n) const { return tile<Keys>(n, kWords); }
  FLASHATTN_FUNC Values values(int n) const { return tile<Values>(n, kWords + Keys::kBytesOfGroups); }

  FLASHATTN_FUNC void bring(int n, int first, int end) const {
    if (first < end) {
      keys(n).template load<THREADS>(key_rows.from(first), end - first, thread);
      values(n).template load<THREADS>(value_rows.from(first), end - first, thread);
    }
  }

 private:
  template <typename Tile>
  FLASHATTN_FUNC Tile tile(int n, int groups) const {
    uint stage = memory + n % STAGES * kStage;
    return Tile{{stage}, {stage + groups}, {stage + groups + Tile::Groups::kBytes}};
  }
};

// Queries for such keys: laid out as those are, and raised.
template <typename T, int ROWS, int D>
struct IntegerQueries {
  SharedTile<T, ROWS, D> tile;
  static constexpr int kOwn = ROWS < kWarpRows ? 1 : 2;
  float sums[kOwn][group_count(D)];  // of the lane's rows, in the unit of products with integers

  // row_at: as in SharedTile::load_rows(). By all of THREADS threads.
  template <int THREADS, typename F>
  static FLASHATTN_FUNC void load_rows(SharedTile<T, ROWS, D> tile, F row_at, int64_t step, uint thread) {
    constexpr int kPieces = D / 8;
    _Pragma("unroll 1") for (uint at = thread; at < ROWS * kPieces; at += THREADS) {
      uint row = at / kPieces, c = at % kPieces;
      const T* from = row_at(row);
      T* to = static_cast<T*>(shared_pointer(tile.piece(row, c)));
      int first = c / kApart<uint> * 8 * kApart<uint> + c % kApart<uint>;
      FLASHATTN_UNROLL
      for (int e = 0; e < 8; ++e) {
        float x = from == nullptr ? 0.0f : float(from[(first + e * kApart<uint>)*step]);
        to[e] = T(x * power_of_two(kRaised<T>));
      }
    }
  }

  // By a warp, once its 16 rows are there.
  FLASHATTN_FUNC void add_up(int lane) {
    FLASHATTN_UNROLL
    for (int h = 0; h < kOwn; ++h) {
      FLASHATTN_UNROLL
      for (int g = 0; g < group_count(D); ++g) {
        float sum = 0;
        FLASHATTN_UNROLL
        for (int c = 0; c < kGroupSize / 8; c += 4) {
          uint pairs[4];
          load_four(pairs, tile.piece(lane / 4 + h * 8, g * (kGroupSize / 8) + c + lane % 4));
          FLASHATTN_UNROLL
          for (int e = 0; e < 8; ++e) {
            T x;
            x.bits = ushort(pairs[e / 2] >> e % 2 * 16);
            sum += float(x) * power_of_two(-kRaised<T>);
          }
        }
        sums[h][g] = lane_sum<4>(sum) * power_of_two(kRaised<T> - kUnit<T>);
      }
    }
  }
};

// What a kernel does with queries, whether keys and values are quantised or not.
template <typename K>
constexpr bool is_quantised = false;
template <>
constexpr bool is_quantised<uint> = true;

template <typename K, int THREADS, typename T, int ROWS, int D, typename F>
FLASHATTN_FUNC void load_query_rows(SharedTile<T, ROWS, D> tile, F row_at, int64_t step, uint thread) {
  if constexpr (is_quantised<K>) {
    IntegerQueries<T, ROWS, D>::template load_rows<THREADS>(tile, row_at, step, thread);
  } else {
    tile.template load_rows<THREADS>(row_at, step, head_dim, thread);
  }
}
template <typename K, int THREADS, typename T, int ROWS, int D>
FLASHATTN_FUNC void load_queries(SharedTile<T, ROWS, D> tile, const T* rows, RowLayout layout, int count, uint thread) {
  if constexpr (is_quantised<K>) {
    const auto row_at = [&](uint row) { return int(row) < count ? rows + layout.offset(row, 0) : nullptr; };
    IntegerQueries<T, ROWS, D>::template load_rows<THREADS>(tile, row_at, layout.column, thread);
  } else {
    tile.template load<THREADS>(rows, layout, count, head_dim, thread);
  }
}
// A warp's, as multiply_keys() takes them. Quantised keys ask for the queries' sums: so the queries must be there.
template <typename K, typename T, int ROWS, int D>
FLASHATTN_FUNC auto queries_for(SharedTile<T, ROWS, D> tile, int lane) {
  if constexpr (is_quantised<K>) {
    IntegerQueries<T, ROWS, D> queries = {tile};
    queries.add_up(lane);
    return queries;
  } else {
    return tile;
  }
}

// scores += 16 rows of queries times all of `keys`.
template <typename T, int ROWS, int KEYS, int D, int FIRST>
FLASHATTN_FUNC void multiply_keys(Fragment (&scores)[KEYS / 8], const IntegerQueries<T, ROWS, D>& queries,
                                  QuantisedTile<KEYS, D, FIRST> keys, int lane) {
  uint of_query = queries.tile.lane_offset(lane % minimum(ROWS, kWarpRows), lane / 16);
  FLASHATTN_UNROLL
  for (int first = 0; first < KEYS; first += 32) {
    FLASHATTN_UNROLL
    for (int g = 0; g < keys.kGroups; ++g) {
      Fragment products[4] = {};
      FLASHATTN_UNROLL
      for (int c = g * keys.kPiecesOfGroup; c < (g + 1) * keys.kPiecesOfGroup; ++c) {
        uint words[4];
        load_matrices(words, keys.words.piece(first + lane, c));
        FLASHATTN_UNROLL
        for (int e = 0; e < kApart<uint>; e += 2) {
          uint a[4];
          load_matrices(a, queries.tile.piece_at(of_query, 0, (c * kApart<uint> + e) / 2));
          FLASHATTN_UNROLL
          for (int j = 0; j < 4; ++j) {
            multiply_add_tile<T>(products[j], a, integers<T>(words[j], e), integers<T>(words[j], e + 1));
          }
        }
      }
      FLASHATTN_UNROLL
      for (int j = 0; j < 4; ++j) {
        int key = first + 8 * j + lane % 4 * 2;
        float2 scale = keys.scales.pair(key, g), bias = keys.biases.pair(key, g);
        FLASHATTN_UNROLL
        for (int i = 0; i < 2 * queries.kOwn; ++i) {
          float& score = scores[first / 8 + j][i];
          score = multiply_add(i % 2 == 0 ? bias.x : bias.y, queries.sums[i / 2][g], score);
          score = multiply_add(i % 2 == 0 ? scale.x : scale.y, products[j][i], score);
        }
      }
    }
  }
  FLASHATTN_UNROLL
  for (int i = 0; i < KEYS / 2; ++i) {
    if (i % 4 < 2 * queries.kOwn) scores[i / 4][i % 4] *= power_of_two(kUnit<T> - kRaised<T>);
  }
}

// output += probabilities times `values`. Behind the output's own fragments are the lane's sums of probability * bias:
// of group g and the lane's row h in fragment g / 2, at 2 h + g % 2. The integers are products with bfloat in any case,
// since probability * scale may be smaller than half's numbers. Its two parts round it; what is lost is made up for
// with the integers' mean.
template <int PARTS, int OWN = 2, int KEYS, int DV, int FIRST, int N>
FLASHATTN_FUNC void add_values(Fragment (&output)[N], const Fragment (&probabilities)[KEYS / 8],
                               QuantisedTile<KEYS, DV, FIRST> values, int lane) {
  static_assert(PARTS == 2, "no kernel rounds these");
  constexpr float kMean = ((1 << kBits) - 1) / 2.0f;
  FLASHATTN_UNROLL
  for (int first = 0; first < KEYS; first += 32) {
    FLASHATTN_UNROLL
    for (int g = 0; g < values.kGroups; ++g) {
      uint a[2][4] = {}, a_small[2][4] = {};
      FLASHATTN_UNROLL
      for (int i = 0; i < 4 * OWN; ++i) {  // the lane's rows of 4 fragments of the tile
        int j = i / OWN, h = i % OWN, key = first + 8 * j + lane % 4 * 2;
        float2 scale = values.scales.pair(key, g), bias = values.biases.pair(key, g);
        const float* p = &probabilities[first / 8 + j][2 * h];
        uint parts[2];
        float lost = split_pair<bfloat>(p[0] * scale.x, p[1] * scale.y, parts);
        a_small[j / 2][j % 2 * 2 + h] = parts[0];
        a[j / 2][j % 2 * 2 + h] = parts[1];
        float& sum = output[DV / 8 + g / 2][2 * h + g % 2];
        sum = multiply_add(p[0], bias.x, multiply_add(p[1], bias.y, multiply_add(lost, kMean, sum)));
      }
      FLASHATTN_UNROLL
      for (int c = g * values.kPiecesOfGroup; c < (g + 1) * values.kPiecesOfGroup; ++c) {
        uint words[4];
        load_matrices_transposed(words, values.words.piece(first + lane, c));
        FLASHATTN_UNROLL
        for (int e = 0; e < kApart<uint>; ++e) {
          FLASHATTN_UNROLL
          for (int step = 0; step < 2; ++step) {
            uint b0 = integers<bfloat>(words[2 * step], e), b1 = integers<bfloat>(words[2 * step + 1], e);
            multiply_add_tile<bfloat>(output[c * kApart<uint> + e], a_small[step], b0, b1);
            multiply_add_tile<bfloat>(output[c * kApart<uint> + e], a[step], b0, b1);
          }
        }
      }
    }
  }
}

// After the last tile: the output in its own unit, with the biases.
template <int DV, int N>
FLASHATTN_FUNC void add_biases(Fragment (&output)[N], int lane) {
  FLASHATTN_UNROLL
  for (int h = 0; h < 2; ++h) {
    FLASHATTN_UNROLL
    for (int g = 0; g < group_count(DV); ++g) {
      float bias = lane_sum<4>(output[DV / 8 + g / 2][2 * h + g % 2]);
      FLASHATTN_UNROLL
      for (int i = 0; i < kGroupSize / 4; ++i) {
        float& x = output[(g * kGroupSize + i * 4) / 8][2 * h + i % 2];
        x = multiply_add(x * power_of_two(kRaised<bfloat>), power_of_two(kUnit<bfloat> - kRaised<bfloat>), bias);
      }
    }
  }
}

}  // namespace flashattn
