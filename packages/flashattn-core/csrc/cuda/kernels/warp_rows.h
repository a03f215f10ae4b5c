// The 16 rows that a warp computes. Their output, maxima and sums stay in the warp's registers from the first key to
// the last.
#pragma once

#include "lane_rows.h"
#include "tile_products.h"
#include "visible_bits.h"

namespace flashattn {

// Four lanes share two rows, whose numbers differ by kRowStep.
constexpr int kRowLanes = 4, kRowStep = 8;

// Stores row h (0 or 1) of a lane's two rows, in the lane's columns below WIDTH. T: the tensor cores' operand type.
// PAIRS: whether one store may write two neighbouring columns, if WIDTH is even.
template <typename T, int WIDTH, bool PAIRS, typename Result, int N>
FLASHATTN_FUNC void store_columns(Result* row, const Fragment (&sums)[N], int h, float factor, int lane) {
  FLASHATTN_UNROLL
  for (int c = 0; c < N; ++c) {
    int column = output_column<T>(c, lane);
    float x = sums[c][2 * h] * factor, y = sums[c][2 * h + 1] * factor;
    if constexpr (PAIRS && WIDTH % 2 == 0 && sizeof(Result) == 2) {
      if (column < WIDTH) *reinterpret_cast<uint*>(row + column) = rounded_pair<Result>(x, y);
    } else if constexpr (PAIRS && WIDTH % 2 == 0) {
      if (column < WIDTH) *reinterpret_cast<float2*>(row + column) = {x, y};
    } else {
      if (column < WIDTH) row[column] = Result(x);
      if (column + kNext<T> < WIDTH) row[column + kNext<T>] = Result(y);
    }
  }
}

// NaN as soon as a number in row h of a lane's two rows is not finite, otherwise 0.
template <int N>
FLASHATTN_FUNC float probe_of(const Fragment (&sums)[N], int h) {
  float probe = 0;
  FLASHATTN_UNROLL
  for (int c = 0; c < N; ++c) probe = multiply_add(sums[c][2 * h], 0, multiply_add(sums[c][2 * h + 1], 0, probe));
  return probe;
}

// half rounds probabilities far below 2^-24 to 0, but their sum can matter. So for half, row_max stays 7 powers of two
// below the maximum. Probabilities can then be as large as 2^(7 + kSlack) = 2^15, which half can still hold.
template <typename T>
constexpr float kBelow = 0;
template <>
constexpr float kBelow<half> = 7;

// T: the output's type. E: the tensor cores' operand type, which decides which columns a lane has.
template <typename T, int DV, int KEYS, typename E = T>
struct WarpRows : LaneRows<WarpRows<T, DV, KEYS, E>, 2, kRowLanes, 1> {
  static constexpr float kScoreUnit = 1, kBelowMax = kBelow<T>;

  Fragment output[DV / 8] = {};
  VisibleBits<false, has_visible ? KEYS : 64> visible;  // of look()'s last tile; without an array any KEYS will do

  static FLASHATTN_FUNC int own_row(int h, int lane) { return lane / kRowLanes + h * kRowStep; }

  template <typename F>
  static FLASHATTN_FUNC void for_each(Fragment (&scores)[KEYS / 8], int first_key, int lane, F function) {
    FLASHATTN_UNROLL
    for (int i = 0; i < KEYS / 2; ++i) {
      function(scores[i / 4][i % 4], i % 4 / 2, first_key + i / 4 * 8 + lane % 4 * 2 + i % 2);
    }
  }
  // Starts to load the bool array's bytes for mask(), if the tile is not `unmasked`. Returns `unmasked`. The caller
  // computes the tile's scores in between, to hide the latency.
  FLASHATTN_FUNC bool look(Visibility visibility, int first_key, bool unmasked, int lane) {
    if constexpr (has_visible) {
      if (!unmasked) visible.read(visibility, this->rows, first_key, lane);
    }
    return unmasked;
  }
  FLASHATTN_FUNC void mask(Fragment (&scores)[KEYS / 8], Visibility visibility, int first_key, int lane) {
    if constexpr (has_visible) visible.take(this->rows, first_key, lane);
    if (has_bias && has_bias_pairs(visibility, first_key, KEYS)) {
      mask_by<true>(scores, visibility, first_key, lane);
    } else {
      mask_by<false>(scores, visibility, first_key, lane);
    }
  }
  // BIAS_PAIRS: whether one load reads the additive array's numbers for two keys.
  template <bool BIAS_PAIRS>
  FLASHATTN_FUNC void mask_by(Fragment (&scores)[KEYS / 8], Visibility visibility, int first_key, int lane) const {
    FLASHATTN_UNROLL
    for (int i = 0; i < KEYS / 2; i += 2) {
      const Row& row = this->rows[i % 4 / 2];
      int key = first_key + i / 4 * 8 + lane % 4 * 2;
      float2 bias = BIAS_PAIRS ? bias_pair(visibility, row, key) : float2{0, 0};
      FLASHATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& x = scores[i / 4][i % 4 + e];
        bool seen = has_visible ? visible[i + e] : row.seen.contains(key + e, 1);
        if (BIAS_PAIRS && !has_tree) {
          x = seen ? visibility.biased(x, e == 0 ? bias.x : bias.y) : -INFINITY;
        } else {
          x = seen ? visibility.masked_by_arrays(x, row, key + e, true) : -INFINITY;
        }
      }
    }
  }
  static FLASHATTN_FUNC float highest(const Fragment (&scores)[KEYS / 8], int h) {
    float result = scores[0][2 * h];
    FLASHATTN_UNROLL
    for (int j = 0; j < KEYS / 8; ++j) result = maximum(result, maximum(scores[j][2 * h], scores[j][2 * h + 1]));
    return result;
  }

  FLASHATTN_FUNC void rescale(Rescaling<2> rescaling) {
    if (rescaling.needed) {
      FLASHATTN_UNROLL
      for (int i = 0; i < DV / 2; ++i) output[i / 4][i % 4] *= rescaling.by[i % 4 / 2];
    }
  }

  FLASHATTN_FUNC void add(const Fragment (&sums)[DV / 8]) {
    FLASHATTN_UNROLL
    for (int i = 0; i < DV / 2; ++i) output[i / 4][i % 4] += sums[i / 4][i % 4];
  }

  FLASHATTN_FUNC float probe(int h, int) const { return probe_of(output, h); }
  FLASHATTN_FUNC void write(T* row, int h, float factor, bool finite, int lane) const {
    if constexpr (DV == value_dim && sizeof(T) == 2) {  // lanes exchange pairs, to write four columns at once
      bool odd = lane % 2 != 0;
      FLASHATTN_UNROLL
      for (int c = 0; c < DV / 8; c += 2) {
        uint pair = rounded_pair<T>(output[c][2 * h] * factor, output[c][2 * h + 1] * factor);
        uint next = rounded_pair<T>(output[c + 1][2 * h] * factor, output[c + 1][2 * h + 1] * factor);
        uint got = __shfl_xor_sync(~0u, odd ? pair : next, 1);
        uint2 four = {odd ? got : pair, odd ? next : got};
        if (finite) *reinterpret_cast<uint2*>(row + (c + odd) * 8 + lane % 4 / 2 * 4) = four;
      }
    } else if (finite) {
      store_columns<E, value_dim, false>(row, output, h, factor, lane);
    }
  }

  FLASHATTN_FUNC void write_exactly(float* row, int h, float factor, int lane) const {
    store_columns<E, value_dim, DV == value_dim>(row, output, h, factor, lane);
  }

  // Writes the lane's columns of its row h to scratch, in float32.
  FLASHATTN_FUNC void leave_row(float* row, int h, int lane) const {
    constexpr int kStep = sizeof(E) == 2 ? 1 : 4;  // see output_column()
    float factor = this->from_max[h];
    FLASHATTN_UNROLL
    for (int c = 0; c < DV / 8; c += kStep) {
      const Fragment* from = this->output + c;
      if constexpr (kStep == 1) {
        *reinterpret_cast<float2*>(row + output_column<E>(c, lane)) = {from[0][2 * h] * factor,
                                                                       from[0][2 * h + 1] * factor};
      } else {
        FLASHATTN_UNROLL
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          *reinterpret_cast<float4*>(row + output_column<E>(c, lane) + e % 2 * kNext<E>) = {
              from[0][e] * factor, from[1][e] * factor, from[2][e] * factor, from[3][e] * factor};
        }
      }
    }
  }
};

// WarpRows whose queries are the first 16 rows of `queries`, a tile in shared memory. K: the type of keys and values.
template <typename T, typename K, int ROWS, int D, int DV, int KEYS>
struct AttendingRows : WarpRows<T, DV, KEYS> {
  // Elements per row of float32 results in shared memory. The padding lets a warp's lanes write to different banks.
  static constexpr int kPitch = DV + (sizeof(T) == 2 ? 8 : 4);

  SharedTile<T, ROWS, D> queries;

  // tiles: CopiedTiles.
  template <int PARTS, typename Tiles>
  FLASHATTN_FUNC void attend(const Tiles& tiles, int n, Visibility visibility, int first_key, bool unmasked, int lane) {
    Fragment scores[KEYS / 8] = {};
    this->look(visibility, first_key, unmasked, lane);
    FLASHATTN_UNROLL
    for (int part = 0; part < Tiles::kKeyParts; ++part) multiply_keys(scores, queries, tiles.keys(n, part), lane);
    this->rescale(this->to_probabilities(scores, visibility, first_key, unmasked, lane));
    constexpr int kOfSmall = kSmallProducts<T> ? PARTS : 1;
    if (Tiles::kValueParts == 2) add_values<kOfSmall>(this->output, scores, tiles.values(n, 0), lane);
    add_values<PARTS>(this->output, scores, tiles.values(n, Tiles::kValueParts - 1), lane);
  }
};

FLASHATTN_FUNC constexpr int whole_lanes(int columns) {
  return (columns + FLASHATTN_LANES - 1) / FLASHATTN_LANES * FLASHATTN_LANES;
}

// Recomputes, without tensor cores, the rows that are not finite. Tensor cores multiply a hidden key's value by 0, and
// 0 times NaN is NaN. rows: the result of store(), with a bit for each row. first: the query of row 0.
template <typename T, typename K>
FLASHATTN_FUNC void attend_again(uint rows, RowOutputs<T> outputs, const T* query, StoredInputs<K> stored,
                                 Visibility visibility, const uchar* sinks, int batch, int head, int first, int lane) {
  const AttentionParams& params = *visibility.params;
  for (; rows != 0; rows &= rows - 1) {
    RowPosition position = row_position(first + __ffs(rows) - 1, head, 1);
    auto row = attended_row<whole_lanes(head_dim), whole_lanes(value_dim)>(
        query, stored, visibility, batch, head / (params.num_heads / params.num_kv_heads), position,
        visibility.seen(position.query), visibility.seen_by_all(position.query, position.query), lane);
    store_row(row, outputs, params, sinks, batch, lane);
  }
}

}  // namespace flashattn
